#include "lazy/passes/dce.h"

#include "csrc/base/check.h"

namespace acc::passes {

std::vector<bool> eliminate_dead_code(const graph::Graph& graph, const std::vector<bool>& alive) {
  ACC_CHECK(alive.size() == graph.buffers.size());
  std::vector<bool> needed(graph.buffers.size());
  for (size_t i = 0; i < graph.buffers.size(); ++i) {
    const graph::Buffer& buffer = graph.buffers[i];
    // Memory that was there before the step stays visible through whoever else holds it.
    if (alive[i] || buffer.kind == graph::BufferKind::kInput) needed[buffer.group] = true;
  }
  std::vector<bool> stays(graph.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const graph::Node& node = graph.nodes[i];
    const auto uses = graph::uses(graph, node);
    bool stay = !node.op->removable;
    for (const graph::Use& use : uses) {
      stay |= use.writes && needed[graph.buffers[use.buffer].group];
    }
    if (!stay) continue;
    stays[i] = true;
    // A fresh result begins here: nothing before this node can write it.
    for (const graph::Use& use : uses) {
      if (use.fresh) needed[graph.buffers[use.buffer].group] = false;
    }
    for (const graph::Use& use : uses) {
      if (!use.fresh) needed[graph.buffers[use.buffer].group] = true;
    }
  }
  return stays;
}

}  // namespace acc::passes
