#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Gives intermediates of convolutional networks the layout "channels last" where that is faster:
// of four dimensions N, C, H, W the channels become innermost in memory. What the user can reach
// keeps its layout; where both meet, a copy is put between.
//
// Each node computes in one layout, each buffer has one, and the assignment is the cheapest by the
// prices in layout.cpp, which are a host's or a GPU's. `outputs` says per buffer whether the user
// can reach it at the end.
// Returns the nodes over the same values, and the same buffers with those of the copies added
// behind them.
graph::Graph choose_layouts(const graph::Graph& graph, const std::vector<bool>& outputs,
                            bool on_gpu);

}  // namespace acc::passes
