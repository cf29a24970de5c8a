#pragma once

#include "lazy/graph/graph.h"

namespace acc::passes {

// Whether any node communicates with other processes.
bool communicates(const graph::Graph& graph);

// What is sent to other processes, and received, goes on while other nodes run: each node that
// communicates only begins, and before the first node that touches what it is about stands one that
// waits for its end ("acc::await_"). What nobody touches is waited for at the end of the graph: no
// transfer outlives its plan. Transfers begin in program order, which is that of all processes.
// Returns the nodes over the same buffers and values, with the waits put between.
graph::Graph overlap_transfers(const graph::Graph& graph);

}  // namespace acc::passes
