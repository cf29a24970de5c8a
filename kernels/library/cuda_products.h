#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

// Products of matrices with an epilogue, by cublasLt.
//
// The library's matrices are column-major and ours mostly row-major, so that left @ right is made
// as the product of the transposed matrices in the other order:
// (left @ right)^T = right^T @ left^T, a = right^T and b = left^T.
namespace acc::library {

// As a tensor says it.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

enum class Transposed : bool { kNo, kYes };

// What a product is, but for where its matrices lie: all that the choice of an algorithm may depend
// on. d = op(a) op(b), and what the epilogue adds; op(a) is m by k, op(b) is k by n, d is m by n;
// the leading dimensions are those of the matrices before they are transposed.
struct Product {
  cudaDataType_t type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  Transposed transpose_a = Transposed::kNo;
  Transposed transpose_b = Transposed::kNo;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t lda = 0;
  int64_t ldb = 0;
  int64_t ldd = 0;
  int64_t ld_aux = 0;  // of what the epilogue reads or writes beside d; 0: nothing

  auto operator<=>(const Product&) const = default;
};

// left @ right, with dense rows; nullopt where the rows of a matrix lie neither one behind the
// other nor does its transpose's, where there is only one row or column (which ATen has found the
// library to refuse), or where its epilogue is not for such matrices.
std::optional<Product> product_of(const Matrix& left, const Matrix& right,
                                  cublasLtEpilogue_t epilogue);

struct Matrices {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  void* bias = nullptr;  // a vector that the epilogue reads or writes
  void* aux = nullptr;   // a matrix that it reads or writes
};

// Where products of a device take place.
struct Place {
  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// Remembers how products are made, per device. Thread safe.
class Products {
 public:
  // How an algorithm is chosen: the first of the library's that runs, which is the same at each
  // call and in each process, or the fastest of those that were tried.
  enum class Choice : bool { kFirst, kTried };
  // How long a call takes, in seconds; infinity when it fails.
  using Clock = std::function<double(const std::function<bool()>&)>;

  // Makes the product. False where the library has no algorithm that runs, where the bias or `aux`
  // is aligned too little for its kernels, or where `instead` was faster when they were tried: then
  // the caller does it in its own way. `instead` returns whether it could.
  //
  // They are tried at the second call with a clock: what never comes again is not worth it. In a
  // capture there can be none; what was not tried before is the first then.
  bool make(const Product& product, const Matrices& matrices, const Place& place, Choice choice,
            const Clock& clock, const std::function<bool()>& instead);

  // Whether `make` is known to return false. Memory that is not there yet is null: as well aligned
  // as that of an allocator.
  bool declines(const Product& product, const Matrices& matrices, const Place& place,
                Choice choice);

 private:
  // With the room that algorithms have, and how each of the matrices is aligned.
  using Key = std::tuple<Product, size_t, std::array<uint32_t, 5>>;
  struct Known {
    std::vector<cublasLtMatmulAlgo_t> algorithms;  // those that have not failed, the first in front
    std::optional<cublasLtMatmulAlgo_t> fastest;   // nullopt: `instead`
    bool tried = false;
    bool called = false;

    bool declines(Choice choice) const;
  };
  // Of programs whose sizes never repeat.
  static constexpr size_t kMostKnown = 4096;

  static Key key_of(const Product& product, const Matrices& matrices, const Place& place);

  std::mutex mutex_;
  std::map<Key, Known> known_;
};

}  // namespace acc::library
