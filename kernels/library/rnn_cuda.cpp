#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_cudnn_rnn_backward.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

// The layers of kernels/library/rnn.cpp, through ATen's entry points of cuDNN.
namespace acc::library {
namespace {

using at::Tensor;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// cuDNN's layers have two biases always; w_ih, w_hh, b_ih, b_hh.
constexpr int64_t kWeights = 4;

int64_t gates_of(int64_t mode) {
  constexpr std::array<int64_t, 4> kGates{1, 1, 4, 3};  // ReLU, tanh, LSTM, GRU
  return kGates.at(static_cast<size_t>(mode));
}

// The shapes of all weights of a stack, in the order of nn.LSTM's parameters.
std::vector<std::vector<int64_t>> shapes(int64_t input_size, int64_t hidden_size, int64_t mode,
                                         int64_t num_layers, bool bidirectional) {
  const int64_t rows = gates_of(mode) * hidden_size;
  const int64_t directions = bidirectional ? 2 : 1;
  std::vector<std::vector<int64_t>> made;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const int64_t width = layer == 0 ? input_size : directions * hidden_size;
    for (int64_t direction = 0; direction < directions; ++direction) {
      made.insert(made.end(), {{rows, width}, {rows, hidden_size}, {rows}, {rows}});
    }
  }
  return made;
}

// ATen asks for weights beside the vector of all of them: for their types and shapes, not for what
// is in them.
std::vector<Tensor> stand_ins(const Tensor& weights,
                              const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<Tensor> made;
  int64_t begin = 0;
  for (const std::vector<int64_t>& shape : shapes) {
    const int64_t n = c10::multiply_integers(shape);
    made.push_back(weights.narrow(0, begin, n).view(shape));
    begin += n;
  }
  return made;
}

FourTensors cudnn_rnn(const Tensor& input, const Tensor& weights, const Tensor& hx,
                      const std::optional<Tensor>& cx, int64_t mode, int64_t num_layers,
                      bool bidirectional, bool train, int64_t) {
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t hidden = hx.size(2);
  const auto parts =
      stand_ins(weights, shapes(input.size(2), hidden, mode, num_layers, bidirectional));
  auto [output, hy, cy, reserve, _] =
      at::_cudnn_rnn(input, parts, kWeights, weights, hx, cx, mode, hidden, /*proj_size=*/0,
                     num_layers, /*batch_first=*/false, /*dropout=*/0, train, bidirectional,
                     /*batch_sizes=*/{}, /*dropout_state=*/std::nullopt);
  return {std::move(output), std::move(hy), std::move(cy), std::move(reserve)};
}

FourTensors cudnn_rnn_backward(const Tensor& input, const Tensor& weights, const Tensor& hx,
                               const std::optional<Tensor>& cx, const Tensor& output,
                               const std::optional<Tensor>& grad_output,
                               const std::optional<Tensor>& grad_hy,
                               const std::optional<Tensor>& grad_cy, const Tensor& reserve,
                               int64_t mode, int64_t num_layers, bool bidirectional) {
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t hidden = hx.size(2);
  const auto parts =
      stand_ins(weights, shapes(input.size(2), hidden, mode, num_layers, bidirectional));
  auto [grad_input, grad_hx, grad_cx, grads] = at::_cudnn_rnn_backward(
      input, parts, kWeights, weights, hx, cx, output, grad_output, grad_hy, grad_cy, mode, hidden,
      /*proj_size=*/0, num_layers, /*batch_first=*/false, /*dropout=*/0, /*train=*/true,
      bidirectional, /*batch_sizes=*/{}, /*dropout_state=*/std::nullopt, reserve,
      {true, true, cx.has_value(), true});
  // Views of one vector, in cuDNN's order.
  const c10::Storage& all = grads.at(0).storage();
  TORCH_INTERNAL_ASSERT(all.nbytes() >= weights.nbytes() &&
                        grads.back().storage().is_alias_of(all));
  Tensor grad_weights = at::empty({0}, weights.options()).set_(all, 0, weights.sizes(), {1});
  if (!grad_cx.defined()) grad_cx = at::empty({0}, hx.options());
  return {std::move(grad_input), std::move(grad_weights), std::move(grad_hx), std::move(grad_cx)};
}

// Asks cuDNN by a call of a layer that nobody has: only its own functions know these numbers.
std::vector<int64_t> cudnn_rnn_layout(at::IntArrayRef input_sizes, int64_t hidden_size,
                                      int64_t mode, int64_t num_layers, bool bidirectional,
                                      bool train, c10::ScalarType dtype, c10::Device device) {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (!hooks.compiledWithCuDNN()) return {};
  const c10::cuda::CUDAGuard guard(device);
  if (dtype == c10::kBFloat16 && !hooks.supportsBFloat16RNNWithCuDNN()) return {};
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  std::vector<Tensor> parts;
  for (const auto& shape : shapes(input_sizes[2], hidden_size, mode, num_layers, bidirectional)) {
    parts.push_back(at::empty(shape, options));
  }
  // The parts become views of what this makes.
  const Tensor weights = at::_cudnn_rnn_flatten_weight(
      parts, kWeights, input_sizes[2], mode, hidden_size,
      /*proj_size=*/0, num_layers, /*batch_first=*/false, bidirectional);
  const int64_t runs = num_layers * (bidirectional ? 2 : 1);
  const Tensor state = at::empty({runs, input_sizes[1], hidden_size}, options);
  constexpr int64_t kLstm = 2;
  const Tensor reserve = std::get<3>(at::_cudnn_rnn(
      at::empty(input_sizes, options), parts, kWeights, weights, state,
      mode == kLstm ? std::optional<Tensor>(state) : std::nullopt, mode, hidden_size,
      /*proj_size=*/0, num_layers, /*batch_first=*/false, /*dropout=*/0, train, bidirectional,
      /*batch_sizes=*/{}, /*dropout_state=*/std::nullopt));
  std::vector<int64_t> layout{reserve.numel(), weights.numel()};
  for (const Tensor& part : parts) layout.push_back(part.storage_offset());
  return layout;
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  m.impl("cudnn_rnn", &cudnn_rnn);
  m.impl("cudnn_rnn_backward", &cudnn_rnn_backward);
  m.impl("cudnn_rnn_layout", &cudnn_rnn_layout);
}

}  // namespace
}  // namespace acc::library
