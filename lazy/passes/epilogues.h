#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Products of matrices take over what stands before or behind them and a GPU's library does while
// it multiplies: the ReLU or GELU (tanh) of a linear layer, the backward of that GELU, the sum of
// the gradient's rows that the bias gets.
//
// Each becomes a call of one operator (kernels/library/epilogues.h). Numbers differ from those of
// two calls at most by one rounding to a half type that does not happen.
graph::Graph join_epilogues(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
