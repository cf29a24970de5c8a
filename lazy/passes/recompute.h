#pragma once

#include <optional>
#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/passes/fuse.h"

namespace acc::passes {

// Computes elementwise values again where a later kernel needs them, instead of keeping them until
// then, if they are held while the step needs the most memory. Only from what is there at that time
// anyway, in kernels that read the values from memory otherwise: what an activation saves for its
// backward, when it is written by hand or has a factor beside it. Nodes that are added have
// Node::again set. The graph with them, or nothing where there is nothing to gain.
//
// `clusters` are those of `graph`, in the order in which they will run. The peak is that of the
// memory of what several of them touch.
std::optional<graph::Graph> recompute(const graph::Graph& graph,
                                      const std::vector<Cluster>& clusters,
                                      const std::vector<bool>& outputs);

}  // namespace acc::passes
