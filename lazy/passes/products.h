#pragma once

#include "lazy/graph/graph.h"

namespace acc::passes {

// Large float32 products, with or without a bias, become the calls that multiply faster on this
// machine (`Op::linear`). Those of a transposed left matrix, as gradients of weights are, stay:
// they are not faster.
//
// Which products change follows from their sizes and the machine alone, so that processes agree.
graph::Graph choose_products(const graph::Graph& graph);

}  // namespace acc::passes
