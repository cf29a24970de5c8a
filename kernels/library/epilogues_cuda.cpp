#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "csrc/base/env.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/exhaustion.h"
#include "kernels/library/cuda_products.h"
#include "kernels/library/epilogues.h"

// The products with epilogues of kernels/library/epilogues.h, by cublasLt.
namespace acc::library {
namespace {

using at::Tensor;

Matrix matrix_of(const Tensor& t) { return {t.size(0), t.size(1), t.stride(0), t.stride(1)}; }

std::optional<cudaDataType_t> type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return CUDA_R_32F;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    default:
      return std::nullopt;
  }
}

// As ATen has cublasLt multiply: with the same settings of the user.
void obey_settings(Product* product) {
  using at::CuBLASReductionOption;
  const at::Context& context = at::globalContext();
  if (product->type == CUDA_R_32F) {
    const auto precision =
        context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    if (precision == at::Float32Precision::TF32) product->compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    return;
  }
  const CuBLASReductionOption option = product->type == CUDA_R_16F
                                           ? context.allowFP16ReductionCuBLAS()
                                           : context.allowBF16ReductionCuBLAS();
  if (option == CuBLASReductionOption::AllowReducedPrecisionWithSplitK) return;
  product->reduction_schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
  if (option == CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK) {
    product->reduction_schemes |= CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  }
}

// The least of some times of a few calls in a row, after one that does not count: while the GPU
// does the first, the next are submitted. Where it is faster than that, the time is the CPU's,
// which captured work does not take.
double seconds_of(const std::function<bool()>& call) {
  constexpr int kTimes = 3;
  constexpr int kCalls = 5;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (!call()) return kNever;
  double least_ms = kNever;
  for (int i = 0; i < kTimes; ++i) {
    c10::cuda::CUDAEvent begin(cudaEventDefault);
    c10::cuda::CUDAEvent end(cudaEventDefault);
    begin.record();
    for (int k = 0; k < kCalls; ++k) {
      if (!call()) return kNever;
    }
    end.record();
    end.synchronize();
    least_ms = std::min(least_ms, static_cast<double>(begin.elapsed_time(end)));
  }
  return 1e-3 * least_ms / kCalls;
}

// Not at::empty: with deterministic algorithms that fills what it makes.
Tensor new_memory(at::IntArrayRef sizes, const Tensor& like) {
  return Tensor(at::detail::empty_cuda(sizes, like.scalar_type(), like.device(), std::nullopt));
}

Products& products() {
  static auto& all = *new std::array<Products, C10_COMPILE_TIME_MAX_GPUS>;
  return all.at(static_cast<size_t>(c10::cuda::current_device()));
}

// What a product is for the library, with the settings of the user; nullopt where ATen's operators
// have to multiply.
std::optional<Product> described(const Tensor& left, const Tensor& right,
                                 cublasLtEpilogue_t epilogue) {
  const at::Context& context = at::globalContext();
  const auto type = type_of(left);
  auto product = product_of(matrix_of(left), matrix_of(right), epilogue);
  if (!type || !product || context.allowFP16AccumulationCuBLAS() ||
      context._SMCarveout_EXPERIMENTAL().has_value()) {
    return std::nullopt;
  }
  product->type = *type;
  obey_settings(&*product);
  return product;
}

// Whether each process and each run has to multiply in the same way.
bool chooses_alike() {
  return runtime::chooses_alike() || base::env::deterministic() ||
         at::globalContext().deterministicAlgorithms();
}

// A product with an epilogue on the current device.
class Multiplication {
 public:
  // Memory that the epilogue writes is null.
  Multiplication(const Tensor& left, const Tensor& right, cublasLtEpilogue_t epilogue,
                 const Tensor* bias, const Tensor* aux)
      : product_(described(left, right, epilogue)) {
    if (!product_.has_value()) return;
    matrices_ = {right.const_data_ptr(), left.const_data_ptr(), nullptr,
                 bias == nullptr ? nullptr : bias->data_ptr(),
                 aux == nullptr ? nullptr : aux->data_ptr()};
    place_ = {at::cuda::getCurrentCUDABlasLtHandle(), c10::cuda::getCurrentCUDAStream().stream(),
              at::cuda::getCUDABlasLtWorkspace(), at::cuda::getCUDABlasLtWorkspaceSize()};
    if (products().declines(*product_, matrices_, place_, choice_)) product_.reset();
  }

  // Whether it is worth making room for the results.
  bool possible() const { return product_.has_value(); }

  // Into `made`, and `bias` and `aux` where they are not null. False: ATen's operators have to.
  bool run(const Tensor& made, const Tensor* bias, const Tensor* aux,
           const std::function<void()>& instead) {
    matrices_.d = made.mutable_data_ptr();
    if (bias != nullptr) matrices_.bias = bias->mutable_data_ptr();
    if (aux != nullptr) matrices_.aux = aux->mutable_data_ptr();
    const bool in_capture =
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    const bool done =
        products().make(*product_, matrices_, place_, choice_,
                        in_capture ? Products::Clock() : Products::Clock(&seconds_of), [&instead] {
                          try {
                            instead();
                            return true;
                          } catch (...) {  // there is no room for both ways at a time
                            if (!runtime::is_out_of_memory(std::current_exception())) throw;
                            return false;
                          }
                        });
    return done;
  }

 private:
  const Products::Choice choice_ =
      chooses_alike() ? Products::Choice::kFirst : Products::Choice::kTried;
  std::optional<Product> product_;
  Matrices matrices_;
  Place place_;
};

TwoTensors cuda_addmm_gelu(const Tensor& bias, const Tensor& left, const Tensor& right) {
  check_product("acc::addmm_gelu", left, right);
  check_bias(bias, right);
  const c10::cuda::CUDAGuard guard(left.device());
  Multiplication product(left, right, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, &bias, nullptr);
  if (product.possible()) {
    const Tensor after = new_memory({left.size(0), right.size(1)}, left);
    const Tensor before = new_memory({left.size(0), right.size(1)}, left);
    if (product.run(after, nullptr, &before, [&] { addmm_gelu(bias, left, right); })) {
      return {after, before};
    }
  }
  return addmm_gelu(bias, left, right);
}

Tensor cuda_mm_gelu_backward(const Tensor& left, const Tensor& right, const Tensor& before) {
  check_product("acc::mm_gelu_backward", left, right);
  check_before(before, left, right);
  const c10::cuda::CUDAGuard guard(left.device());
  Multiplication product(left, right, CUBLASLT_EPILOGUE_DGELU, nullptr, &before);
  if (product.possible()) {
    const Tensor made = new_memory({left.size(0), right.size(1)}, left);
    if (product.run(made, nullptr, nullptr, [&] { mm_gelu_backward(left, right, before); })) {
      return made;
    }
  }
  return mm_gelu_backward(left, right, before);
}

// Whether the library's sum is as exact as ATen's, and known not to be slow: where nothing may be
// tried, it is not taken (NVIDIA/CUDALibrarySamples issue 90 reports half the speed on 8 A100), and
// with TF32 nothing says whether it adds what the product rounds.
bool sums_well(const Tensor& left) {
  const bool tf32 =
      left.scalar_type() == at::kFloat &&
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32;
  return !tf32 && !chooses_alike();
}

TwoTensors cuda_mm_and_sum(const Tensor& left, const Tensor& right, bool keepdim) {
  check_product("acc::mm_and_sum", left, right);
  const c10::cuda::CUDAGuard guard(left.device());
  if (!sums_well(left)) return mm_and_sum(left, right, keepdim);
  Multiplication product(left, right, CUBLASLT_EPILOGUE_BGRADB, nullptr, nullptr);
  if (product.possible()) {
    const int64_t rows = left.size(0);
    const Tensor made = new_memory({rows, right.size(1)}, left);
    const Tensor sum = keepdim ? new_memory({1, rows}, left) : new_memory({rows}, left);
    if (product.run(made, &sum, nullptr, [&] { mm_and_sum(left, right, keepdim); })) {
      return {made, sum};
    }
  }
  return mm_and_sum(left, right, keepdim);
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  m.impl("addmm_gelu", &cuda_addmm_gelu);
  m.impl("mm_gelu_backward", &cuda_mm_gelu_backward);
  m.impl("mm_and_sum", &cuda_mm_and_sum);
}

}  // namespace
}  // namespace acc::library
