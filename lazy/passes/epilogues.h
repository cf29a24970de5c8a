#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// What surrounds a product of two matrices joins its call, as epilogues of cublasLt
// (kernels/library/epilogues.h):
//
//   relu(addmm(..)), gelu(addmm(.., "tanh"))      with what the backward needs
//   the backward of these, of mm(..)              with the sum of its rows, a bias' gradient
//   mm(..) and the sum of rows of an operand      gradients of a weight and a bias
//
// What generated kernels would do along with other work is left to them: activations that a
// kernel reads next, sums of what a kernel makes.
//
// `outputs`: per buffer, whether the user sees it. The graph may have more buffers than before.
graph::Graph join_epilogues(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
