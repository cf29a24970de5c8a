#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>

// Layers of cuDNN's, recurrent in all steps, layers and directions at once. `weights` is one vector
// of all of them, in cuDNN's order, which acc::cudnn_rnn_layout tells:
//   bytes that the backward needs of the forward, elements of `weights`, and where in it each
//   layer's and direction's w_ih, w_hh, b_ih and b_hh begin; nothing where cuDNN has no such layer.
// The kernels are in rnn_cuda.cpp; a host has none.
namespace acc::library {
namespace {

using at::Tensor;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor like(const Tensor& tensor) {
  return at::detail::empty_meta(tensor.sizes(), tensor.scalar_type());
}

Tensor like(const std::optional<Tensor>& tensor, const Tensor& other) {
  return tensor.has_value() ? like(*tensor) : at::detail::empty_meta({0}, other.scalar_type());
}

FourTensors cudnn_rnn_meta(const Tensor& input, const Tensor&, const Tensor& hx,
                           const std::optional<Tensor>& cx, int64_t, int64_t, bool bidirectional,
                           bool, int64_t reserve_bytes) {
  const int64_t width = hx.size(2) * (bidirectional ? 2 : 1);
  return {at::detail::empty_meta({input.size(0), input.size(1), width}, input.scalar_type()),
          like(hx), like(cx, hx), at::detail::empty_meta({reserve_bytes}, c10::kByte)};
}

FourTensors cudnn_rnn_backward_meta(const Tensor& input, const Tensor& weights, const Tensor& hx,
                                    const std::optional<Tensor>& cx, const Tensor&,
                                    const std::optional<Tensor>&, const std::optional<Tensor>&,
                                    const std::optional<Tensor>&, const Tensor&, int64_t, int64_t,
                                    bool) {
  return {like(input), like(weights), like(hx), like(cx, hx)};
}

TORCH_LIBRARY_FRAGMENT(acc, m) {
  m.def(
      "cudnn_rnn(Tensor input, Tensor weights, Tensor hx, Tensor? cx, int mode, int num_layers, "
      "bool bidirectional, bool train, int reserve_bytes) -> (Tensor, Tensor, Tensor, Tensor)");
  // It writes what the forward has left for it, and so can be called once.
  m.def(
      "cudnn_rnn_backward(Tensor input, Tensor weights, Tensor hx, Tensor? cx, Tensor output, "
      "Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor(a!) reserve, int mode, "
      "int num_layers, bool bidirectional) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cudnn_rnn_layout(int[] input_sizes, int hidden_size, int mode, int num_layers, "
      "bool bidirectional, bool train, ScalarType dtype, Device device) -> int[]");
}

TORCH_LIBRARY_IMPL(acc, Meta, m) {
  m.impl("cudnn_rnn", &cudnn_rnn_meta);
  m.impl("cudnn_rnn_backward", &cudnn_rnn_backward_meta);
}

}  // namespace
}  // namespace acc::library
