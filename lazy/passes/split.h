#pragma once

#include "lazy/graph/graph.h"

namespace acc::passes {

// A backward whose results are sums over different dimensions becomes a call for each of them, by
// its output_mask, so that each can be computed in the loops that suit it: of a layer norm the
// gradient of the input, which goes row by row, and those of weight and bias, which sum over rows.
// Returns a graph over the same buffers and values.
graph::Graph split_backwards(const graph::Graph& graph);

}  // namespace acc::passes
