#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Products of matrices take over what stands before or behind them and a GPU's library does while
// it multiplies: the ReLU or GELU (tanh) of a linear layer, the backward of that GELU, the sum of
// the gradient's rows that the bias gets.
//
// Each becomes a call of one operator (kernels/library/epilogues.h). A GELU is taken of what was
// accumulated, not of what that rounds to, and its tanh is the library's: with ACC_EXACT there is
// none. Numbers of the others are those of two calls.
graph::Graph join_epilogues(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
