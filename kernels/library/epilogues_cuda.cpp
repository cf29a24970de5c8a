#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "csrc/base/check.h"
#include "kernels/library/epilogues.h"

// Products with epilogues by cublasLt. It takes matrices as columns, so it is given the transposed
// product: b' @ a', and what is a column here is a row there.
namespace acc::library {
namespace {

using at::Tensor;

// All that cublasLt reads and writes is at multiples of so many bytes.
constexpr uint32_t kAlignment = 16;
// How many of the algorithms that cublasLt proposes are timed, and how often.
constexpr int kProposals = 8;
constexpr int kTimes = 3;

void check(cublasStatus_t status) {
  ACC_CHECK(status == CUBLAS_STATUS_SUCCESS, "[cublasLt] ", cublasLtGetStatusString(status));
}

template <class Handle, cublasStatus_t (*destroy)(Handle)>
struct Destroy {
  void operator()(Handle handle) const { (void)destroy(handle); }
};
template <class Handle, cublasStatus_t (*destroy)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<Handle, destroy>>;
using Matrix = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

struct Product {
  cublasLtEpilogue_t epilogue;
  const Tensor& a;
  const Tensor& b;
  const Tensor& made;
  void* bias = nullptr;  // or where its gradient is put
  void* aux = nullptr;
  int64_t aux_ld = 0;  // elements from one row to the next, bits for ReLU
};

cudaDataType_t type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return CUDA_R_32F;
    case at::kHalf:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

cublasComputeType_t compute_type(const Tensor& tensor) {
  const bool tf32 = tensor.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Whether rows are columns to cublasLt.
bool has_rows(const Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
}
int64_t leading(const Tensor& matrix) { return matrix.stride(has_rows(matrix) ? 0 : 1); }

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kAlignment == 0;
}

Matrix describe(const Tensor& matrix) {
  const bool rows = has_rows(matrix);
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(
      &made, type_of(matrix), static_cast<uint64_t>(matrix.size(rows ? 1 : 0)),
      static_cast<uint64_t>(matrix.size(rows ? 0 : 1)), leading(matrix)));
  return Matrix(made);
}

template <class T>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(description.get(), attribute, &value, sizeof(value)));
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

Description describe(const Product& product) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, compute_type(product.made), CUDA_R_32F));
  Description description(made);
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, has_rows(product.b) ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, has_rows(product.a) ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(description, CUBLASLT_MATMUL_DESC_EPILOGUE, product.epilogue);
  if (product.bias != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    set(description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(product.made));
  }
  if (product.aux != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.aux);
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.aux_ld);
  }
  return description;
}

// A product, ready to be made by one algorithm or another.
class Call {
 public:
  explicit Call(const Product& product)
      : product_(product),
        description_(describe(product)),
        left_(describe(product.b)),
        right_(describe(product.a)),
        made_(describe(product.made)),
        stream_(c10::cuda::getCurrentCUDAStream()),
        workspace_bytes_(at::cuda::getCUDABlasLtWorkspaceSize()),
        workspace_(c10::cuda::CUDACachingAllocator::get()->allocate(workspace_bytes_)) {}

  std::vector<cublasLtMatmulHeuristicResult_t> proposals() const {
    cublasLtMatmulPreference_t made = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made));
    const Preference preference(made);
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(workspace_bytes_));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(preference, attribute, kAlignment);
    }
    std::vector<cublasLtMatmulHeuristicResult_t> found(kProposals);
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, description_.get(), left_.get(), right_.get(), made_.get(), made_.get(),
        preference.get(), kProposals, found.data(), &count);
    found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(count) : 0);
    return found;
  }

  bool run(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1;
    const float zero = 0;
    return cublasLtMatmul(
               handle_, description_.get(), &one, product_.b.const_data_ptr(), left_.get(),
               product_.a.const_data_ptr(), right_.get(), &zero, product_.made.const_data_ptr(),
               made_.get(), product_.made.mutable_data_ptr(), made_.get(), &algorithm,
               workspace_.get(), workspace_bytes_, stream_.stream()) == CUBLAS_STATUS_SUCCESS;
  }

  // The fastest; nothing where none works.
  std::optional<cublasLtMatmulAlgo_t> fastest() const {
    std::optional<cublasLtMatmulAlgo_t> best;
    float best_ms = std::numeric_limits<float>::infinity();
    c10::cuda::CUDAEvent begin(cudaEventDefault);
    c10::cuda::CUDAEvent end(cudaEventDefault);
    for (const auto& each : proposals()) {
      if (!run(each.algo)) continue;
      begin.record(stream_);
      for (int i = 0; i < kTimes; ++i) run(each.algo);
      end.record(stream_);
      end.synchronize();
      const float ms = begin.elapsed_time(end);
      if (ms >= best_ms) continue;
      best_ms = ms;
      best = each.algo;
    }
    return best;
  }

 private:
  const Product& product_;
  const cublasLtHandle_t handle_ = at::cuda::getCurrentCUDABlasLtHandle();
  const Description description_;
  const Matrix left_;
  const Matrix right_;
  const Matrix made_;
  const c10::cuda::CUDAStream stream_;
  const size_t workspace_bytes_;
  const c10::DataPtr workspace_;
};

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// By which algorithm a product is made: the fastest, found out when there is the first of its kind;
// the first proposal where that cannot be timed, or is not to decide. Nothing: there is none.
std::optional<cublasLtMatmulAlgo_t> choose(const Product& product, const Call& call) {
  using Kind = std::array<int64_t, 12>;
  static std::mutex mutex;
  static auto& known = *new std::map<Kind, std::optional<cublasLtMatmulAlgo_t>>;
  const Tensor& a = product.a;
  const Tensor& b = product.b;
  const Kind kind{a.get_device(), product.epilogue, type_of(a),  compute_type(a),
                  a.size(0),      a.size(1),        b.size(1),   leading(a),
                  leading(b),     has_rows(a),      has_rows(b), product.aux_ld};
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(kind); found != known.end()) return found->second;
  }
  std::optional<cublasLtMatmulAlgo_t> algorithm;
  if (is_capturing() || at::globalContext().deterministicAlgorithms()) {
    const auto proposals = call.proposals();
    if (!proposals.empty()) algorithm = proposals[0].algo;
  } else {
    algorithm = call.fastest();
  }
  const std::lock_guard lock(mutex);
  return known.emplace(kind, algorithm).first->second;
}

// False where cublasLt cannot make it.
bool multiply(const Product& product) {
  for (const void* address :
       {product.a.const_data_ptr(), product.b.const_data_ptr(), product.made.const_data_ptr(),
        const_cast<const void*>(product.bias), const_cast<const void*>(product.aux)}) {
    if (!is_aligned(address)) return false;
  }
  // Sums in half precision, which a user has to ask for, are ATen's.
  if (at::globalContext().allowFP16AccumulationCuBLAS()) return false;
  const Call call(product);
  const auto algorithm = choose(product, call);
  return algorithm.has_value() && call.run(*algorithm);
}

// How the bits lie and what becomes of NaN is written nowhere, so a small product shows whether
// they are those of our own. Asked during a capture, before it was: no.
bool relu_is_known(const Tensor& like) {
  static std::mutex mutex;
  static auto& answers = *new std::map<std::pair<c10::DeviceIndex, at::ScalarType>, bool>;
  const std::lock_guard lock(mutex);
  const std::pair device(like.device().index(), like.scalar_type());
  if (const auto found = answers.find(device); found != answers.end()) return found->second;
  if (is_capturing()) return false;
  constexpr int64_t kWidth = 256;
  const auto options = like.options();
  const Tensor bias = at::zeros({kWidth}, options);
  const Tensor a = at::full({kWidth, kWidth}, 1, options).triu_(3);
  const Tensor b = at::full({kWidth, kWidth}, -1, options).triu_(1);
  b.diagonal().fill_(7);
  b.select(1, 5).fill_(std::numeric_limits<double>::quiet_NaN());
  const Tensor made = at::empty({kWidth, kWidth}, options);
  const Tensor aux = at::empty({kWidth, kWidth / 8}, options.dtype(at::kByte));
  const auto [expected, bits] = addmm_activation(bias, a, b, /*use_gelu=*/false, /*with_aux=*/true);
  return answers[device] = multiply({CUBLASLT_EPILOGUE_RELU_AUX_BIAS, a, b, made, bias.data_ptr(),
                                     aux.data_ptr(), kWidth}) &&
                           at::equal(bits, aux) &&
                           at::allclose(made, expected, 1e-3, 1e-3, /*equal_nan=*/true);
}

TwoTensors addmm_activation_cuda(const Tensor& bias, const Tensor& a, const Tensor& b,
                                 bool use_gelu, bool with_aux) {
  const c10::cuda::CUDAGuard guard(a.device());
  if (use_gelu || relu_is_known(a)) {
    const Tensor made = at::empty({a.size(0), b.size(1)}, a.options());
    const auto epilogue =
        use_gelu ? (with_aux ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS)
                 : (with_aux ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_RELU_BIAS);
    Product product{epilogue, a, b, made, bias.data_ptr()};
    Tensor aux;
    if (with_aux) {
      aux = use_gelu ? at::empty_like(made)
                     : at::empty({a.size(0), b.size(1) / 8}, a.options().dtype(at::kByte));
      product.aux = aux.data_ptr();
      product.aux_ld = b.size(1);
    }
    if (multiply(product)) return {made, aux};
  }
  return addmm_activation(bias, a, b, use_gelu, with_aux);
}

TwoTensors mm_activation_backward_cuda(const Tensor& a, const Tensor& b, const Tensor& aux,
                                       bool use_gelu, bool bias_gradient) {
  const c10::cuda::CUDAGuard guard(a.device());
  if (use_gelu || relu_is_known(a)) {
    const Tensor made = at::empty({a.size(0), b.size(1)}, a.options());
    const Tensor sum = bias_gradient ? at::empty({b.size(1)}, a.options()) : Tensor();
    const auto epilogue =
        use_gelu ? (bias_gradient ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU)
                 : (bias_gradient ? CUBLASLT_EPILOGUE_DRELU_BGRAD : CUBLASLT_EPILOGUE_DRELU);
    if (multiply({epilogue, a, b, made, bias_gradient ? sum.mutable_data_ptr() : nullptr,
                  aux.data_ptr(), b.size(1)})) {
      return {made, sum};
    }
  }
  return mm_activation_backward(a, b, aux, use_gelu, bias_gradient);
}

TwoTensors mm_bias_gradient_cuda(const Tensor& a, const Tensor& b, bool left) {
  const c10::cuda::CUDAGuard guard(a.device());
  const Tensor made = at::empty({a.size(0), b.size(1)}, a.options());
  const Tensor sum = at::empty({left ? a.size(0) : b.size(1)}, a.options());
  if (multiply({left ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA, a, b, made,
                sum.mutable_data_ptr()})) {
    return {made, sum};
  }
  return mm_bias_gradient(a, b, left);
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  m.impl("addmm_activation", &addmm_activation_cuda);
  m.impl("mm_activation_backward", &mm_activation_backward_cuda);
  m.impl("mm_bias_gradient", &mm_bias_gradient_cuda);
}

}  // namespace
}  // namespace acc::library
