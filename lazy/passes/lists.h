#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Takes calls on lists of tensors (`_foreach_*`) apart and runs neighbouring ones item by
// item: all of an optimizer's arithmetic for one parameter, then all for the next. The temporaries
// of one parameter are then alive at a time instead of those of all, and its numbers stay in the
// cache.
//
// `stays` says per node of `graph` whether it is to run. Returns the nodes that run, over the same
// buffers and values; with `split` false, the lists as they are.
graph::Graph run_lists_by_item(const graph::Graph& graph, const std::vector<bool>& stays,
                               bool split);

}  // namespace acc::passes
