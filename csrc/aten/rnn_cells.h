#pragma once

#include <ATen/core/Tensor.h>

namespace acc::aten {

enum class RnnKind { kTanh, kRelu, kGru, kLstm };

// The weights of one layer in one direction. Biases are undefined without biases; `w_hr` is defined
// for an LSTM with projections.
struct RnnWeights {
  at::Tensor w_ih, w_hh, b_ih, b_hh, w_hr;
};

// What goes from step to step: h, and for an LSTM c.
struct RnnState {
  at::Tensor h, c;
};

// Throws where sizes do not fit, as ATen's cells do: some would be broadcast, and oneDNN would read
// beyond what it is given. Of states of several layers, before batch and hidden size, each has
// these.
void rnn_check(RnnKind kind, const c10::SymInt& batch, const c10::SymInt& features,
               const RnnState& state, const RnnWeights& weights);

// The products of the input with its weights, biases included, for any leading dimensions.
at::Tensor rnn_input_gates(const at::Tensor& input, const RnnWeights& weights);

// One step as ATen's CPU cells do it, from the input gates of that step.
RnnState rnn_step(RnnKind kind, const at::Tensor& input_gates, const RnnState& state,
                  const RnnWeights& weights);

}  // namespace acc::aten
