#pragma once

#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/passes/fuse.h"
#include "lazy/passes/lower.h"

namespace acc::passes {

// What runs as one step: a node by ATen (no launches), or launches of one kernel.
struct Batch {
  std::vector<uint32_t> nodes;  // of the graph, ascending
  codegen::KernelSpec kernel;
  std::vector<Launch> launches;
};

// Turns clusters into kernels where that pays, and puts launches of equal kernels that are
// independent of each other into one step: the update of all parameters, say. `outputs`: per
// buffer, whether the user can reach it at the end. `alike`: as `lower` has it.
std::vector<Batch> batch(const graph::Graph& graph, std::vector<Cluster> clusters,
                         const std::vector<bool>& outputs, bool alike = false);

}  // namespace acc::passes
