#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <tuple>

#include "csrc/base/philox.h"
#include "csrc/runtime/cuda_draws.h"
#include "csrc/runtime/gil.h"

// The operators of kernels/library/attention.cpp, through ATen's entry points.
namespace acc::library {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::optional<c10::CaptureId_t> current_capture(c10::DeviceIndex device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  c10::CaptureId_t id = 0;
  C10_CUDA_CHECK(
      cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(device).stream(), &status, &id));
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return id;
}

base::Stream stream_of(int64_t seed, int64_t offset) {
  return base::other_generator_stream({static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)});
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& bias, double dropout_p, bool is_causal,
                                     std::optional<double> scale, bool flash, const Tensor& philox,
                                     int64_t seed, int64_t offset) {
  // Who runs an operator at once has no other lock.
  static auto& mutex = *new std::mutex;
  const runtime::LockWithoutGil alone(mutex);
  const c10::DeviceIndex device = query.device().index();
  const runtime::CudaDraws draws(*at::check_generator<at::CUDAGeneratorImpl>(
                                     at::cuda::detail::getDefaultCUDAGenerator(device)),
                                 stream_of(seed, offset), philox, current_capture(device));
  if (flash) {
    const auto made = at::_scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, /*return_debug_mask=*/false, scale);
    return {std::get<0>(made), std::get<1>(made)};
  }
  const auto made = at::_scaled_dot_product_efficient_attention(
      query, key, value, bias, /*compute_log_sumexp=*/true, dropout_p, is_causal, scale);
  return {std::get<0>(made), std::get<1>(made)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& out, const Tensor& sums, double dropout_p,
    bool of_bias, bool is_causal, std::optional<double> scale, bool flash, const Tensor& philox,
    int64_t seed, int64_t offset) {
  const Tensor none;
  if (flash) {  // which reads there, captured or not
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, sums, none, none, query.size(2), key.size(2), dropout_p,
        is_causal, philox.view(at::kUInt64), none, scale);
    return {of_query, of_key, of_value, none};
  }
  // Seed and offset on the CPU, or, for work that is captured, on the GPU.
  const bool captured = current_capture(query.device().index()).has_value();
  const base::Stream stream = stream_of(seed, offset);
  const auto word = [&](int64_t at, uint64_t number) {
    return captured ? philox.select(0, at)
                    : at::scalar_tensor(static_cast<int64_t>(number), at::kLong);
  };
  return at::_scaled_dot_product_efficient_attention_backward(
      gradient, query, key, value, bias.value_or(none), out, sums, word(0, stream.seed),
      word(1, stream.offset), dropout_p, {true, true, true, of_bias}, is_causal, scale);
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
}

}  // namespace
}  // namespace acc::library
