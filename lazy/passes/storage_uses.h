#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lazy/graph/graph.h"

// Who touches which storage, for passes that let a tensor stand for another.
namespace acc::passes {

class StorageUses {
 public:
  explicit StorageUses(const graph::Graph& graph);

  struct Touch {
    uint32_t node;
    bool writes;
  };
  // The nodes that touch the storage of a buffer, each once, ascending.
  std::span<const Touch> of(uint32_t buffer) const;
  // Whether one of the nodes from `begin` up to before `end` writes the storage of a buffer.
  bool is_written(uint32_t buffer, uint32_t begin, uint32_t end) const;
  // The last node before `end` that writes it; -1 if there is none.
  int64_t last_write(uint32_t buffer, uint32_t end) const;
  // The last node that touches it.
  uint32_t last(uint32_t buffer) const { return of(buffer).back().node; }

 private:
  const graph::Graph& graph_;
  std::vector<std::vector<Touch>> touches_;  // per storage, by its first buffer
};

// A buffer of the step that one node fills and nobody changes afterwards: any tensor with the same
// values can stand for what is read from it, unless the user sees it.
struct Definition {
  uint32_t buffer = 0;
  const int64_t* tensor = nullptr;  // as the node fills it
};

// What `node`, the node number `index`, defines: its results, or the target of a copy to new
// memory. Empty where it writes anything else too.
std::vector<Definition> definitions(const graph::Graph& graph, const StorageUses& uses,
                                    const graph::Node& node, uint32_t index);

// Whether the tensor at `word` is all of its buffer, which is fresh, each byte once.
bool covers(const graph::Graph& graph, const int64_t* word);

// Whether the node converts one tensor to another (a copy or a cast), and nothing else.
bool is_conversion(const graph::Graph& graph, const graph::Node& node);

}  // namespace acc::passes
