#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "lazy/graph/graph.h"

// Which node has to wait for which. Program order satisfies every edge; a pass that leaves it keeps
// the edges. They are derived from the words when asked for, so recording pays nothing for them.
namespace acc::graph {

enum class Hazard : uint8_t {
  kReadAfterWrite,
  kWriteAfterRead,
  kWriteAfterWrite,
  kTransferOrder,  // both communicate: other processes do so in this order
  kTransferEnd,    // waits for what the other begins, which may touch no byte here
};

struct Edge {
  uint32_t from = 0;  // nodes; from < to
  uint32_t to = 0;
  Hazard hazard = Hazard::kReadAfterWrite;

  auto operator<=>(const Edge&) const = default;
};

struct Bytes {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const Bytes&) const = default;
};

// What a use touches of its storage, from the first to the last byte. Of a storage that nobody
// writes, which has no places to compare, what it touches of its buffer.
Bytes place_of(const Graph& graph, const Use& use);

// Every direct dependence between two nodes over a byte that both touch, once per kind, sorted, and
// one between each node that communicates and the next, and the one that waits for its end. A
// byte's dependences go back to its last write, and from a write also to the reads since that.
// Views count from their first to their last byte, so two interleaved views (the columns of a
// matrix) depend on each other. Buffers of one storage are compared by their place in it.
std::vector<Edge> edges(const Graph& graph);

// Per node, the nodes that it directly depends on, ascending.
std::vector<std::vector<uint32_t>> predecessors(const Graph& graph);

}  // namespace acc::graph
