#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Leaves out copies that nobody needs: what reads a copy of the same type and layout reads the
// source, if nobody writes either of them while the copy is used (`contiguous` of what is
// contiguous by another name, `clone`, `to` after `to`). A tensor that was cast to a wider type and
// back is a copy of what it was; casts that round stay.
//
// A copy that the user sees stays, and so does one whose source would otherwise be gone sooner and
// takes more memory.
//
// `outputs`: per buffer, whether the user can reach it at the end. Returns the graph without the
// copies, over the same buffers and values.
graph::Graph eliminate_copies(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
