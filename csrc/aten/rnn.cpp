#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gru_cell_native.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_cell_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "csrc/runtime/backend.h"

// Recurrent layers as the CPU runs them: LSTM through oneDNN's fused layer, cells by parts. These
// kernels stand above autograd and call differentiable operators only, so gradients come by
// themselves. On CUDA ATen's own paths are left alone.
namespace acc::aten {
namespace {

bool on_host() { return runtime::backend().alias_type() == c10::kCPU; }

// oneDNN's numbering of the kinds of recurrent layers.
constexpr int64_t kLstm = 2;

bool fused_lstm(const at::Tensor& input, at::TensorList hx, at::TensorList params,
                bool has_biases) {
  if (!at::globalContext().userEnabledMkldnn() || !at::globalContext().hasMKLDNN()) return false;
  if (input.scalar_type() != c10::kFloat || input.numel() == 0 || hx.size() != 2) return false;
  // With projections a layer has one weight more, which oneDNN's layer does not take.
  if (hx[0].size(2) != hx[1].size(2)) return false;
  const size_t per_layer = has_biases ? 4 : 2;
  if (params.size() % per_layer != 0) return false;
  for (const at::Tensor& tensor : params) {
    if (tensor.scalar_type() != c10::kFloat) return false;
  }
  return true;
}

// Layer by layer, direction by direction. (L: layers, D: directions, T: steps, B: batch)
// input [T, B, I] or [B, T, I]; hx, cx [L*D, B, H]; output [T, B, D*H] or [B, T, D*H].
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_fused_lstm(
    const at::Tensor& input, at::TensorList hx, at::TensorList params, bool has_biases,
    int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const size_t per_layer = has_biases ? 4 : 2;
  const int64_t directions = bidirectional ? 2 : 1;
  const at::Tensor h0 = hx[0].contiguous();
  const at::Tensor c0 = hx[1].contiguous();
  const int64_t hidden_size = h0.size(2);
  at::Tensor x = (batch_first ? input.transpose(0, 1) : input).contiguous();
  std::vector<at::Tensor> last_h;
  std::vector<at::Tensor> last_c;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t index = layer * directions + direction;
      const auto weights = params.slice(static_cast<size_t>(index) * per_layer, per_layer);
      const auto bias = [&](size_t which) {
        return has_biases ? weights[2 + which]
                          : at::zeros(weights[which].sizes(), weights[which].options());
      };
      auto [y, h, c, workspace] = at::mkldnn_rnn_layer(
          x, weights[0], weights[1], bias(0), bias(1), h0[index], c0[index], direction > 0,
          /*batch_sizes=*/{}, kLstm, hidden_size, num_layers, has_biases, bidirectional,
          batch_first, train);
      outputs.push_back(y);
      last_h.push_back(h);
      last_c.push_back(c);
    }
    x = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer + 1 < num_layers) x = at::dropout(x, dropout, true);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(last_h), at::stack(last_c)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList hx,
                                                    at::TensorList params, bool has_biases,
                                                    int64_t num_layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  if (on_host() && fused_lstm(input, hx, params, has_biases)) {
    return run_fused_lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                          batch_first);
  }
  return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                          batch_first);
}

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

// One LSTM step from the gates' products; order of gates i, f, g, o. The third result is what a
// fused backward would need and is never read here.
std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const at::Tensor gates =
      with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
  const auto parts = gates.unsafe_chunk(4, 1);
  const at::Tensor cy = at::sigmoid(parts[1]) * cx + at::sigmoid(parts[0]) * at::tanh(parts[2]);
  return {at::sigmoid(parts[3]) * at::tanh(cy), cy, gates};
}

// One GRU step; order of gates r, z, n.
std::tuple<at::Tensor, at::Tensor> fused_gru_cell(const at::Tensor& input_gates,
                                                  const at::Tensor& hidden_gates,
                                                  const at::Tensor& hx,
                                                  const std::optional<at::Tensor>& input_bias,
                                                  const std::optional<at::Tensor>& hidden_bias) {
  const auto x = with_bias(input_gates, input_bias).unsafe_chunk(3, 1);
  const auto h = with_bias(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const at::Tensor reset = at::sigmoid(h[0] + x[0]);
  const at::Tensor update = at::sigmoid(h[1] + x[1]);
  const at::Tensor fresh = at::tanh(x[2] + h[2] * reset);
  return {(hx - fresh) * update + fresh, hidden_gates};
}

// nn.LSTMCell and nn.GRUCell, with the biases inside the products as on the CPU: the fused cells
// above get products without them, which rounds differently.
std::tuple<at::Tensor, at::Tensor> lstm_layer_cell(const at::Tensor& input, at::TensorList hx,
                                                   const at::Tensor& w_ih, const at::Tensor& w_hh,
                                                   const std::optional<at::Tensor>& b_ih,
                                                   const std::optional<at::Tensor>& b_hh) {
  if (!on_host()) return at::native::lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh);
  const at::Tensor gates = at::linear(hx[0], w_hh, b_hh) + at::linear(input, w_ih, b_ih);
  const auto parts = gates.unsafe_chunk(4, 1);
  const at::Tensor cy = at::sigmoid(parts[1]) * hx[1] + at::sigmoid(parts[0]) * at::tanh(parts[2]);
  return {at::sigmoid(parts[3]) * at::tanh(cy), cy};
}

at::Tensor gru_layer_cell(const at::Tensor& input, const at::Tensor& hx, const at::Tensor& w_ih,
                          const at::Tensor& w_hh, const std::optional<at::Tensor>& b_ih,
                          const std::optional<at::Tensor>& b_hh) {
  if (!on_host()) return at::native::gru_cell(input, hx, w_ih, w_hh, b_ih, b_hh);
  return std::get<0>(
      fused_gru_cell(at::linear(input, w_ih, b_ih), at::linear(hx, w_hh, b_hh), hx, {}, {}));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("lstm_cell", &lstm_layer_cell);
  m.impl("gru_cell", &gru_layer_cell);
  m.impl("lstm.input", &lstm);
  m.impl("_thnn_fused_lstm_cell", &fused_lstm_cell);
  m.impl("_thnn_fused_gru_cell", &fused_gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("lstm_cell", &lstm_layer_cell);
  m.impl("gru_cell", &gru_layer_cell);
  m.impl("lstm.input", &lstm);
  m.impl("_thnn_fused_lstm_cell", &fused_lstm_cell);
  m.impl("_thnn_fused_gru_cell", &fused_gru_cell);
}

}  // namespace
}  // namespace acc::aten
