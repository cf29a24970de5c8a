#include "csrc/aten/rnn_cells.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <tuple>

// On a device that is not the CPU, ATen's cells add the biases outside the products, for a fused
// kernel of CUDA's that the CPU does not have. Here the cells are those of the CPU: on the host in
// the same order of operations, for the same bits; on a GPU for kernels of ours. They stand above
// autograd and call differentiable operators only.
namespace acc::aten {
namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

at::Tensor state_gates(const RnnState& state, const RnnWeights& weights) {
  return at::linear(state.h, weights.w_hh, optional(weights.b_hh));
}

// Order of gates: i, f, g, o.
RnnState lstm_step(const at::Tensor& input_gates, const RnnState& state,
                   const RnnWeights& weights) {
  const auto gates = (state_gates(state, weights) + input_gates).unsafe_chunk(4, 1);
  const at::Tensor c = at::sigmoid(gates[1]) * state.c + at::sigmoid(gates[0]) * at::tanh(gates[2]);
  const at::Tensor h = at::sigmoid(gates[3]) * at::tanh(c);
  return {weights.w_hr.defined() ? at::matmul(h, weights.w_hr.t()) : h, c};
}

// Order of gates: r, z, n. The first two are computed in place, in rows of the product: on plain
// rows the vectorised sigmoid would round other elements.
RnnState gru_step(const at::Tensor& input_gates, const RnnState& state, const RnnWeights& weights) {
  const auto x = input_gates.unsafe_chunk(3, 1);
  const auto h = state_gates(state, weights).unsafe_chunk(3, 1);
  const at::Tensor reset = h[0].add_(x[0]).sigmoid_();
  const at::Tensor update = h[1].add_(x[1]).sigmoid_();
  const at::Tensor fresh = at::tanh(x[2] + h[2] * reset);
  return {(state.h - fresh) * update + fresh, {}};
}

RnnWeights weights_of(const at::Tensor& w_ih, const at::Tensor& w_hh,
                      const std::optional<at::Tensor>& b_ih,
                      const std::optional<at::Tensor>& b_hh) {
  return {w_ih, w_hh, b_ih.value_or(at::Tensor()), b_hh.value_or(at::Tensor()), {}};
}

std::tuple<at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, at::TensorList hx,
                                             const at::Tensor& w_ih, const at::Tensor& w_hh,
                                             const std::optional<at::Tensor>& b_ih,
                                             const std::optional<at::Tensor>& b_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  const RnnWeights weights = weights_of(w_ih, w_hh, b_ih, b_hh);
  rnn_check(RnnKind::kLstm, input.sym_size(0), input.sym_size(1), {hx[0], hx[1]}, weights);
  const RnnState next =
      rnn_step(RnnKind::kLstm, rnn_input_gates(input, weights), {hx[0], hx[1]}, weights);
  return {next.h, next.c};
}

at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& hx, const at::Tensor& w_ih,
                    const at::Tensor& w_hh, const std::optional<at::Tensor>& b_ih,
                    const std::optional<at::Tensor>& b_hh) {
  const RnnWeights weights = weights_of(w_ih, w_hh, b_ih, b_hh);
  rnn_check(RnnKind::kGru, input.sym_size(0), input.sym_size(1), {hx, {}}, weights);
  return rnn_step(RnnKind::kGru, rnn_input_gates(input, weights), {hx, {}}, weights).h;
}

}  // namespace

void rnn_check(RnnKind kind, const c10::SymInt& batch, const c10::SymInt& features,
               const RnnState& state, const RnnWeights& weights) {
  const auto& [w_ih, w_hh, b_ih, b_hh, w_hr] = weights;
  const int64_t gates = kind == RnnKind::kLstm ? 4 : kind == RnnKind::kGru ? 3 : 1;
  const c10::SymInt hidden = w_hh.sym_size(0) / gates;
  TORCH_CHECK(features == w_ih.sym_size(1), "input has inconsistent input_size: got ", features,
              " expected ", w_ih.sym_size(1));
  TORCH_CHECK(w_ih.sym_size(0) == w_hh.sym_size(0) &&
                  hidden * gates == (w_hr.defined() ? w_hr.sym_size(1) : w_hh.sym_size(1)) * gates,
              "weight_ih and weight_hh have ", gates, " rows for each of hidden_size, got ",
              w_ih.sym_sizes(), " and ", w_hh.sym_sizes());
  const auto fits = [&](const at::Tensor& given, const char* name, const c10::SymInt& size) {
    TORCH_CHECK(given.sym_size(-2) == batch, "Input batch size ", batch, " doesn't match ", name,
                " batch size ", given.sym_size(-2));
    TORCH_CHECK(given.sym_size(-1) == size, name, " has inconsistent hidden_size: got ",
                given.sym_size(-1), ", expected ", size);
  };
  fits(state.h, "hidden0", w_hh.sym_size(1));
  if (state.c.defined()) fits(state.c, "hidden1", hidden);
}

at::Tensor rnn_input_gates(const at::Tensor& input, const RnnWeights& weights) {
  return at::linear(input, weights.w_ih, optional(weights.b_ih));
}

RnnState rnn_step(RnnKind kind, const at::Tensor& input_gates, const RnnState& state,
                  const RnnWeights& weights) {
  switch (kind) {
    case RnnKind::kTanh:
      return {at::tanh(state_gates(state, weights) + input_gates), {}};
    case RnnKind::kRelu:
      return {at::relu(state_gates(state, weights) + input_gates), {}};
    case RnnKind::kGru:
      return gru_step(input_gates, state, weights);
    case RnnKind::kLstm:
      return lstm_step(input_gates, state, weights);
  }
  TORCH_INTERNAL_ASSERT(false);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("lstm_cell", &lstm_cell);
  m.impl("gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("lstm_cell", &lstm_cell);
  m.impl("gru_cell", &gru_cell);
}

}  // namespace acc::aten
