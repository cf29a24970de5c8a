#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
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

// The least of some times, after one that does not count.
double seconds_of(const std::function<bool()>& call) {
  constexpr int kTimes = 3;
  if (!call()) return std::numeric_limits<double>::infinity();
  double least_ms = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kTimes; ++i) {
    c10::cuda::CUDAEvent begin(cudaEventDefault);
    c10::cuda::CUDAEvent end(cudaEventDefault);
    begin.record();
    call();
    end.record();
    end.synchronize();
    least_ms = std::min(least_ms, static_cast<double>(begin.elapsed_time(end)));
  }
  return 1e-3 * least_ms;
}

Products& products() {
  static auto& all = *new std::array<Products, C10_COMPILE_TIME_MAX_GPUS>;
  return all.at(static_cast<size_t>(c10::cuda::current_device()));
}

// left @ right in new memory; nullopt where ATen's operators are to do what `instead` does.
std::optional<Tensor> multiply(const Tensor& left, const Tensor& right, cublasLtEpilogue_t epilogue,
                               void* bias, const Tensor* aux,
                               const std::function<void()>& instead) {
  const at::Context& context = at::globalContext();
  const auto type = type_of(left);
  auto product = product_of(matrix_of(left), matrix_of(right), epilogue);
  if (!type || !product || context.allowFP16AccumulationCuBLAS()) return std::nullopt;
  product->type = *type;
  obey_settings(&*product);

  Tensor made = at::empty({product->n, product->m}, left.options());
  const Matrices matrices{right.const_data_ptr(), left.const_data_ptr(), made.mutable_data_ptr(),
                          bias, aux == nullptr ? nullptr : aux->data_ptr()};
  const Place place{at::cuda::getCurrentCUDABlasLtHandle(),
                    c10::cuda::getCurrentCUDAStream().stream(), at::cuda::getCUDABlasLtWorkspace(),
                    at::cuda::getCUDABlasLtWorkspaceSize()};
  const bool alike =
      runtime::chooses_alike() || base::env::deterministic() || context.deterministicAlgorithms();
  const bool in_capture =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  const bool done = products().make(
      *product, matrices, place, alike ? Products::Choice::kFirst : Products::Choice::kTried,
      in_capture ? Products::Clock() : Products::Clock(&seconds_of), instead);
  return done ? std::optional(std::move(made)) : std::nullopt;
}

TwoTensors cuda_addmm_gelu(const Tensor& bias, const Tensor& left, const Tensor& right) {
  const Tensor before = at::empty({left.size(0), right.size(1)}, left.options());
  auto after = multiply(left, right, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, bias.data_ptr(), &before,
                        [&] { addmm_gelu(bias, left, right); });
  if (!after) return addmm_gelu(bias, left, right);
  return {std::move(*after), before};
}

Tensor cuda_mm_gelu_backward(const Tensor& left, const Tensor& right, const Tensor& before) {
  auto made = multiply(left, right, CUBLASLT_EPILOGUE_DGELU, nullptr, &before,
                       [&] { mm_gelu_backward(left, right, before); });
  return made ? std::move(*made) : mm_gelu_backward(left, right, before);
}

TwoTensors cuda_mm_and_sum(const Tensor& left, const Tensor& right, bool keepdim) {
  const int64_t rows = left.size(0);
  Tensor sum = keepdim ? at::empty({1, rows}, left.options()) : at::empty({rows}, left.options());
  auto made = multiply(left, right, CUBLASLT_EPILOGUE_BGRADB, sum.data_ptr(), nullptr,
                       [&] { mm_and_sum(left, right, keepdim); });
  if (!made) return mm_and_sum(left, right, keepdim);
  return {std::move(*made), std::move(sum)};
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  m.impl("addmm_gelu", &cuda_addmm_gelu);
  m.impl("mm_gelu_backward", &cuda_mm_gelu_backward);
  m.impl("mm_and_sum", &cuda_mm_and_sum);
}

}  // namespace
}  // namespace acc::library
