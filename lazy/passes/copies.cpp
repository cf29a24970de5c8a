#include "lazy/passes/copies.h"

#include <algorithm>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"
#include "lazy/passes/substitution.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::kNobody;
using graph::Node;
using graph::Tag;
using graph::TensorWords;

// Whether every number of type `from` is one of the wider type `to`.
bool is_exact(uint8_t from, uint8_t to) {
  return graph::dtype::is_floating(from) && graph::dtype::is_floating(to) &&
         graph::element_bytes(from) < graph::element_bytes(to);
}

// Equal elements at equal distances.
bool same_layout(const TensorWords& a, const TensorWords& b) {
  if ((a.flags | b.flags) != 0 || !std::ranges::equal(a.sizes, b.sizes)) return false;
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    if (a.sizes[i] != 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

class CopyElimination {
 public:
  CopyElimination(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph),
        outputs_(outputs),
        uses_(graph),
        read_as_(graph),
        last_(graph.buffers.size(), 0),
        cast_of_(graph.buffers.size(), kNobody) {}

  Graph run() {
    out_.buffers = graph_.buffers;
    out_.nodes.reserve(graph_.nodes.size());
    out_.words.reserve(graph_.words.size());
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      read_as_.append(graph_, graph_.nodes[i], &out_);
      gone_.push_back(is_copy(graph_.nodes[i]) && eliminate(i));
    }
    if (std::ranges::find(gone_, true) == gone_.end()) return std::move(out_);
    Graph kept;
    kept.buffers = std::move(out_.buffers);
    for (size_t i = 0; i < out_.nodes.size(); ++i) {
      if (!gone_[i]) kept.append(out_.nodes[i], out_.words);
    }
    return kept;
  }

 private:
  // (target, source, whether it blocks): what `clone`, `to` and `contiguous` are recorded as.
  bool is_copy(const Node& node) const {
    return node.op->writes && is_conversion(graph_, node) &&
           graph::tag_of(*items_of(graph_, node)[1]) == Tag::kTensor;
  }
  static std::vector<const int64_t*> items_of(const Graph& graph, const Node& node) {
    return graph::items(graph.arguments(node));
  }

  // Whether the copy, which is the last node of out_, can go.
  bool eliminate(uint32_t index) {
    const std::vector<Definition> made = definitions(graph_, uses_, graph_.nodes[index], index);
    if (made.empty()) return false;
    undo_cast(index);
    const std::vector<const int64_t*> items = items_of(out_, out_.nodes.back());
    const TensorWords target = graph::read_tensor(items[0]);
    const TensorWords source = graph::read_tensor(items[1]);
    if (source.buffer == target.buffer || source.dtype != target.dtype) {
      if (is_exact(source.dtype, target.dtype)) cast_of_[target.buffer] = index;
      return false;
    }
    const uint32_t last = uses_.last(target.buffer);
    const auto bytes = source.offset * static_cast<int64_t>(graph::element_bytes(source.dtype));
    if (outputs_[target.buffer] || !same_layout(source, target) ||
        uses_.is_written(source.buffer, index + 1, last + 1) || !fits(target.buffer, bytes) ||
        !is_held(source.buffer, graph_.buffers[target.buffer].nbytes, last)) {
      return false;
    }
    read_as_.replace(target.buffer, source.buffer, bytes);
    keep(source.buffer, last);
    return true;
  }

  // Reads what was cast to a wider type and is now cast back.
  void undo_cast(uint32_t index) {
    const Node& node = out_.nodes.back();
    const std::vector<const int64_t*> items = items_of(out_, node);
    const TensorWords target = graph::read_tensor(items[0]);
    const TensorWords wide = graph::read_tensor(items[1]);
    const uint32_t cast = cast_of_[wide.buffer];
    if (cast == kNobody) return;
    const std::vector<const int64_t*> before = items_of(out_, out_.nodes[cast]);
    const TensorWords first = graph::read_tensor(before[1]);
    if (first.dtype != target.dtype || wide.offset != 0 || first.flags != 0 ||
        !std::ranges::equal(first.sizes, wide.sizes) ||
        !same_layout(graph::read_tensor(before[0]), wide) ||
        uses_.is_written(first.buffer, cast + 1, index + 1)) {
      return;
    }
    const bool alone = !outputs_[wide.buffer] && uses_.last(wide.buffer) == index;
    if (!alone && !is_held(first.buffer, 0, index)) return;
    const std::vector<int64_t> words(before[1], before[1] + graph::item_words(before[1]));
    std::ranges::copy(words, out_.words.begin() + (items[1] - out_.words.data()));
    keep(first.buffer, index);
    if (alone && uses_.of(wide.buffer).size() == 2) gone_[cast] = true;
  }

  // Whether the elements of all tensors in a buffer would lie at multiples of their size.
  bool fits(uint32_t buffer, int64_t bytes) const {
    bool all = true;
    for (const StorageUses::Touch& touch : uses_.of(buffer)) {
      const Node& node = graph_.nodes[touch.node];
      graph::for_each_tensor<const int64_t>(
          graph_.words.data() + node.words, graph_.words.data() + node.end,
          [&](const int64_t* word) {
            if (static_cast<uint32_t>(word[1]) != buffer) return;
            all &= bytes % graph::element_bytes(graph::dtype_of(*word)) == 0;
          });
    }
    return all;
  }

  // Whether reading a buffer up to the node `last` holds no more than `saved` bytes that were free.
  bool is_held(uint32_t buffer, uint64_t saved, uint32_t last) const {
    const graph::Buffer& storage = graph_.buffers[graph_.buffers[buffer].group];
    return storage.kind != graph::BufferKind::kFresh || outputs_[buffer] ||
           std::max(last_[buffer], uses_.last(buffer)) >= last || storage.nbytes <= saved;
  }

  void keep(uint32_t buffer, uint32_t last) { last_[buffer] = std::max(last_[buffer], last); }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  Substitution read_as_;
  Graph out_;                      // a node for each of graph_
  std::vector<bool> gone_;         // per node
  std::vector<uint32_t> last_;     // per buffer: the last node that reads it for another
  std::vector<uint32_t> cast_of_;  // per buffer: the node that made it by a cast to a wider type
};

}  // namespace

Graph eliminate_copies(const Graph& graph, const std::vector<bool>& outputs) {
  return CopyElimination(graph, outputs).run();
}

}  // namespace acc::passes
