#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Products of several matrices with the same matrix become one product of their rows, where the
// rows of each are few: the shared matrix is then read once rather than once per product. That is
// what a recurrent network that is written out step by step does with its inputs, and backward
// with their gradients.
//
// The operands are copied below each other; who reads a result reads rows of the joint one. The
// joint product stands before the first reader of any of its rows.
//
// `outputs`: per buffer, whether the user can reach it at the end. Returns the graph with new
// buffers behind the old ones, over the same values.
graph::Graph join_rows(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
