#pragma once

#include <cstdint>
#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/passes/loops.h"

namespace acc::passes {

// Nodes that run as one step: one that has no other form than ATen's kernel, or any number that one
// nest of loops computes.
struct Cluster {
  std::vector<uint32_t> nodes;  // in order
  Nest nest;                    // no accesses: the single node is not elementwise
  std::vector<uint32_t> first;  // per node: its first access in the nest

  bool elementwise() const { return !nest.accesses.empty(); }
};

// Joins elementwise nodes that depend on each other element by element, wherever they stand in the
// graph, as long as nothing that has to run between them stays outside; then neighbours that read
// the same elements. The clusters come in an order that satisfies every dependence.
//
// Conditions for two to be joined: their elements are as many and in the same order; the memory
// that both touch and one writes is walked through alike by both, or is disjoint; no path of
// dependences leads from one to the other through a third; same settings; not above the caps in
// fuse.cpp.
//
// `in_parts`: however many elements a reduction has, it is not the work of one thread.
std::vector<Cluster> fuse(const graph::Graph& graph, bool in_parts = false);

}  // namespace acc::passes
