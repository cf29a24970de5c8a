#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Common subexpression elimination: of two equal calls whose operands nobody writes in between, the
// first one's results are read for the second's.
//
// Calls are equal when operator, settings, operands with their geometry and structural arguments
// are. Numbers that change from run to run equal nothing, and random operators have no equals. A
// result that the user sees, or that somebody writes, keeps memory of its own. Nothing is kept
// alive for this that is large and dead by the second call: who computes something anew in the
// backward pass (activation checkpointing) means to save its memory.
//
// `outputs`: per buffer, whether the user can reach it at the end. Returns the graph without the
// second calls, over the same buffers and values.
graph::Graph eliminate_common_calls(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
