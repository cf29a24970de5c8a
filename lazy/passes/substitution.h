#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/graph/graph.h"
#include "lazy/graph/words.h"

namespace acc::passes {

// Which buffers are read where others were. Nodes are put into a new graph in order, so that what
// stands for a buffer is never itself stood for.
class Substitution {
 public:
  explicit Substitution(const graph::Graph& graph) : by_(graph.buffers.size()) {
    for (uint32_t i = 0; i < by_.size(); ++i) by_[i].buffer = i;
  }

  // From now on `buffer` begins `bytes` after the begin of `by`.
  void replace(uint32_t buffer, uint32_t by, int64_t bytes = 0) { by_[buffer] = {by, bytes}; }

  // Puts a node of `graph` at the end of `out`. Buffers that came later stand for themselves.
  void append(const graph::Graph& graph, const graph::Node& node, graph::Graph* out) const {
    out->append(node, graph.words);
    const graph::Node& added = out->nodes.back();
    graph::for_each_tensor(out->words.data() + added.words, out->words.data() + added.end,
                           [this](int64_t* word) {
                             if (static_cast<size_t>(word[1]) >= by_.size()) return;
                             const Place& place = by_[static_cast<size_t>(word[1])];
                             const int64_t element = graph::element_bytes(graph::dtype_of(*word));
                             ACC_CHECK(place.bytes % element == 0);
                             word[1] = place.buffer;
                             word[2] += place.bytes / element;
                           });
  }

 private:
  struct Place {
    uint32_t buffer = 0;
    int64_t bytes = 0;
  };
  std::vector<Place> by_;
};

}  // namespace acc::passes
