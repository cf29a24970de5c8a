#include "lazy/passes/storage_uses.h"

#include <algorithm>

#include "lazy/graph/formula.h"
#include "lazy/graph/words.h"
#include "lazy/passes/loops.h"

namespace acc::passes {

using graph::Tag;

bool covers(const graph::Graph& graph, const int64_t* word) {
  const graph::TensorWords tensor = graph::read_tensor(word);
  if (tensor.offset != 0) return false;
  uint64_t elements = 1;
  int64_t last = 0;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] == 0 || tensor.strides[i] < 0) return false;
    elements *= static_cast<uint64_t>(tensor.sizes[i]);
    last += (tensor.sizes[i] - 1) * tensor.strides[i];
  }
  const Access access{0, tensor.dtype, 0, {tensor.strides.begin(), tensor.strides.end()}};
  return static_cast<uint64_t>(last) + 1 == elements && is_injective(access, tensor.sizes) &&
         elements * graph::element_bytes(tensor.dtype) == graph.buffers[tensor.buffer].nbytes;
}

StorageUses::StorageUses(const graph::Graph& graph)
    : graph_(graph), touches_(graph.buffers.size()) {
  for (uint32_t i = 0; i < graph.nodes.size(); ++i) {
    for (const graph::Use& use : graph::uses(graph, graph.nodes[i])) {
      std::vector<Touch>& touches = touches_[graph.buffers[use.buffer].group];
      if (touches.empty() || touches.back().node != i) touches.push_back({i, false});
      touches.back().writes |= use.writes;
    }
  }
}

std::span<const StorageUses::Touch> StorageUses::of(uint32_t buffer) const {
  return touches_[graph_.buffers[buffer].group];
}

bool StorageUses::is_written(uint32_t buffer, uint32_t begin, uint32_t end) const {
  const auto all = of(buffer);
  for (auto at = std::ranges::lower_bound(all, begin, {}, &Touch::node);
       at != all.end() && at->node < end; ++at) {
    if (at->writes) return true;
  }
  return false;
}

int64_t StorageUses::last_write(uint32_t buffer, uint32_t end) const {
  const auto all = of(buffer);
  for (auto at = std::ranges::lower_bound(all, end, {}, &Touch::node); at != all.begin();) {
    if ((--at)->writes) return at->node;
  }
  return -1;
}

bool is_conversion(const graph::Graph& graph, const graph::Node& node) {
  const graph::Formula* formula = graph::formula_of(graph, node);
  return formula != nullptr && formula->converts;
}

std::vector<Definition> definitions(const graph::Graph& graph, const StorageUses& uses,
                                    const graph::Node& node, uint32_t index) {
  std::vector<Definition> found;
  const auto add = [&](const int64_t* tensor) {
    const uint32_t number = graph::read_tensor(tensor).buffer;
    const graph::Buffer& buffer = graph.buffers[number];
    const auto touches = uses.of(number);
    if (buffer.kind != graph::BufferKind::kFresh || buffer.group != number ||
        touches.front().node != index || uses.is_written(number, index + 1, UINT32_MAX)) {
      return false;
    }
    found.push_back({number, tensor});
    return true;
  };
  if (node.op->writes) {
    if (!is_conversion(graph, node) || !graph.results(node).empty()) return {};
    const int64_t* target = graph.arguments(node).data();
    if (!covers(graph, target) || !add(target)) return {};
    return found;
  }
  for (const int64_t* result : graph::items(graph.results(node))) {
    const Tag tag = graph::tag_of(*result);
    if (tag == Tag::kUndefined) continue;
    if (tag != Tag::kTensor || !add(result)) return {};
  }
  return found;
}

}  // namespace acc::passes
