#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "csrc/aten/rnn_cells.h"

namespace acc::aten {

// Recurrent layers as cuDNN takes them: all sequences have the same steps, and nothing is dropped
// between layers.
struct RnnLayers {
  RnnKind kind;
  int64_t num_layers;
  bool bidirectional;
  bool train;
};

// Outputs and last states by cuDNN's own layers, all steps, layers and directions in one recorded
// operator; nothing where cells have to do it. Sizes were checked.
//
// input: [steps, batch, features]; h, and for an LSTM c: [layers * directions, batch, hidden];
// weights: of each layer and direction.
std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> cudnn_layers(
    const RnnLayers& layers, const at::Tensor& input, const at::Tensor& h, const at::Tensor& c,
    const std::vector<RnnWeights>& weights);

}  // namespace acc::aten
