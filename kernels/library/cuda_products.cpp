#include "kernels/library/cuda_products.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <memory>

#include "csrc/base/check.h"

namespace acc::library {
namespace {

using Status = cublasStatus_t;

void check(Status status, const char* what) {
  ACC_CHECK(status == CUBLAS_STATUS_SUCCESS, "[cublasLt] ", what, ": ",
            cublasLtGetStatusString(status));
}

template <class Handle, Status (*destroy)(Handle)>
struct Destroyer {
  void operator()(Handle handle) const { destroy(handle); }
};
template <class Handle, Status (*destroy)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Handle, destroy>>;

using Descriptor = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <class Value>
void set(const Descriptor& descriptor, cublasLtMatmulDescAttributes_t attribute, Value value) {
  check(cublasLtMatmulDescSetAttribute(descriptor.get(), attribute, &value, sizeof value),
        "setting an attribute of a product");
}

template <class Value>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         Value value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
        "setting what algorithms may do");
}

Layout make_layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t leading) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows),
                                   static_cast<uint64_t>(columns), leading),
        "describing a matrix");
  return Layout(made);
}

Descriptor make_descriptor(const Product& product, const Matrices& matrices) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, product.compute, CUDA_R_32F), "describing a product");
  Descriptor descriptor(made);
  const auto operation = [](Transposed transposed) {
    return static_cast<int32_t>(transposed == Transposed::kYes ? CUBLAS_OP_T : CUBLAS_OP_N);
  };
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSA, operation(product.transpose_a));
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSB, operation(product.transpose_b));
  set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(product.epilogue));
  if (matrices.bias != nullptr) {
    set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, matrices.bias);
    set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(product.type));
  }
  if (product.ld_aux != 0) {
    set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matrices.aux);
    set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.ld_aux);
  }
  return descriptor;
}

// The largest power of two that divides an address, as far as algorithms care.
uint32_t alignment(const void* address) {
  constexpr uintptr_t kMost = 256;
  const auto bits = std::bit_cast<uintptr_t>(address) | kMost;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// Kernels may take what an epilogue reads and writes beside d in words of so many bytes, whatever
// the search was told: pytorch/pytorch pull request 194497 has one that faults at a bias aligned to
// less, where d's alignment had been given as the bias's.
constexpr uint32_t kEpilogueAlignment = 16;

bool suits_epilogues(const Matrices& matrices) {
  return std::min(alignment(matrices.bias), alignment(matrices.aux)) >= kEpilogueAlignment;
}

// A product with all that the library wants to be told.
class Call {
 public:
  Call(const Product& product, const Matrices& matrices, const Place& place)
      : matrices_(matrices),
        place_(place),
        descriptor_(make_descriptor(product, matrices)),
        a_(matrix(product, product.transpose_a, product.m, product.k, product.lda)),
        b_(matrix(product, product.transpose_b, product.k, product.n, product.ldb)),
        d_(make_layout(product.type, product.m, product.n, product.ldd)) {}

  // In the order in which the library expects them to be fast; empty where it has none.
  std::vector<cublasLtMatmulAlgo_t> algorithms(const Product& product) const {
    constexpr int kMost = 8;
    cublasLtMatmulPreference_t made = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made), "describing what algorithms may do");
    const Preference preference(made);
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(place_.workspace_bytes));
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, product.reduction_schemes);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(matrices_.a));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(matrices_.b));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(matrices_.d));
    // What the epilogue takes has no preference of its own. ATen gives the bias's here.
    const uint32_t written =
        std::min({alignment(matrices_.d), alignment(matrices_.bias), alignment(matrices_.aux)});
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, written);
    std::array<cublasLtMatmulHeuristicResult_t, kMost> found{};
    int count = 0;
    const Status status = cublasLtMatmulAlgoGetHeuristic(
        place_.handle, descriptor_.get(), a_.get(), b_.get(), d_.get(), d_.get(), preference.get(),
        kMost, found.data(), &count);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    if (status != CUBLAS_STATUS_SUCCESS) return algorithms;
    for (int i = 0; i < count; ++i) {
      const auto& each = found[static_cast<size_t>(i)];
      if (each.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(each.algo);
    }
    return algorithms;
  }

  // Whether the library has taken it on. What it lists it may still refuse.
  bool run(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1;
    const float zero = 0;
    const Status status =
        cublasLtMatmul(place_.handle, descriptor_.get(), &one, matrices_.a, a_.get(), matrices_.b,
                       b_.get(), &zero, matrices_.d, d_.get(), matrices_.d, d_.get(), &algorithm,
                       place_.workspace, place_.workspace_bytes, place_.stream);
    return status == CUBLAS_STATUS_SUCCESS;
  }

 private:
  // What op() makes a matrix of so many rows and columns of.
  static Layout matrix(const Product& product, Transposed transposed, int64_t rows, int64_t columns,
                       int64_t leading) {
    if (transposed == Transposed::kYes) std::swap(rows, columns);
    return make_layout(product.type, rows, columns, leading);
  }

  const Matrices& matrices_;
  const Place& place_;
  const Descriptor descriptor_;
  const Layout a_;
  const Layout b_;
  const Layout d_;
};

// op(side) is the transposed matrix.
struct Side {
  Transposed transposed;
  int64_t leading;
};

std::optional<Side> side_of(const Matrix& m) {
  if (m.column_stride == 1 && m.row_stride >= m.columns) {
    return Side{Transposed::kNo, m.row_stride};
  }
  if (m.row_stride == 1 && m.column_stride >= m.rows) {
    return Side{Transposed::kYes, m.column_stride};
  }
  return std::nullopt;
}

// Whether the epilogue reads or writes a matrix beside the result.
bool has_aux(cublasLtEpilogue_t epilogue) { return (static_cast<uint32_t>(epilogue) & 128U) != 0; }

// The fastest algorithm; nullopt where `instead` is faster than each.
std::optional<cublasLtMatmulAlgo_t> fastest(const Call& call,
                                            const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                                            const Products::Clock& clock,
                                            const std::function<bool()>& instead) {
  std::optional<cublasLtMatmulAlgo_t> best;
  double best_s = std::numeric_limits<double>::infinity();
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
    const double seconds = clock([&] { return call.run(algorithm); });
    if (seconds < best_s) {
      best = algorithm;
      best_s = seconds;
    }
  }
  if (!best.has_value()) return best;
  return clock(instead) < best_s ? std::nullopt : best;
}

}  // namespace

std::optional<Product> product_of(const Matrix& left, const Matrix& right,
                                  cublasLtEpilogue_t epilogue) {
  constexpr int64_t kAuxElements = 8;  // what the leading dimension of the matrix is to be of
  const auto a = side_of(right);
  const auto b = side_of(left);
  if (!a || !b || left.rows < 2 || left.columns < 2 || right.columns < 2) return std::nullopt;
  Product product;
  product.epilogue = epilogue;
  product.transpose_a = a->transposed;
  product.transpose_b = b->transposed;
  product.m = right.columns;
  product.n = left.rows;
  product.k = left.columns;
  product.lda = a->leading;
  product.ldb = b->leading;
  product.ldd = product.m;
  if (has_aux(epilogue)) {
    if (product.m % kAuxElements != 0) return std::nullopt;
    product.ld_aux = product.m;
  }
  return product;
}

Products::Key Products::key_of(const Product& product, const Matrices& matrices,
                               const Place& place) {
  return {product,
          place.workspace_bytes,
          {alignment(matrices.a), alignment(matrices.b), alignment(matrices.d),
           alignment(matrices.bias), alignment(matrices.aux)}};
}

bool Products::Known::declines(Choice choice) const {
  if (choice == Choice::kTried && tried) return !fastest.has_value();
  return called && algorithms.empty();
}

bool Products::declines(const Product& product, const Matrices& matrices, const Place& place,
                        Choice choice) {
  if (!suits_epilogues(matrices)) return true;
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(key_of(product, matrices, place));
  return found != known_.end() && found->second.declines(choice);
}

bool Products::make(const Product& product, const Matrices& matrices, const Place& place,
                    Choice choice, const Clock& clock, const std::function<bool()>& instead) {
  if (!suits_epilogues(matrices)) return false;
  const Call call(product, matrices, place);
  const std::lock_guard lock(mutex_);
  if (known_.size() >= kMostKnown) known_.clear();
  Known& known = known_[key_of(product, matrices, place)];
  if (!known.called) known.algorithms = call.algorithms(product);
  if (choice == Choice::kTried && known.called && !known.tried && clock != nullptr) {
    known.fastest = fastest(call, known.algorithms, clock, instead);
    known.tried = true;
  }
  known.called = true;
  if (choice == Choice::kTried && known.tried) {
    if (known.fastest.has_value() && call.run(*known.fastest)) return true;
    known.fastest.reset();
    return false;
  }
  while (!known.algorithms.empty()) {
    if (call.run(known.algorithms.front())) return true;
    known.algorithms.erase(known.algorithms.begin());
  }
  return false;
}

}  // namespace acc::library
