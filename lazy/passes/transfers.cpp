#include "lazy/passes/transfers.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/graph/words.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Use;

// Bytes of a storage.
struct Range {
  uint32_t group;
  int64_t begin;
  int64_t end;
  bool written;
};

struct Transfer {
  uint32_t node;  // of the new graph
  std::vector<Range> ranges;
};

std::vector<Range> ranges_of(const Graph& graph, const Node& node) {
  std::vector<Range> ranges;
  for (const Use& use : graph::uses(graph, node)) {
    const graph::Buffer& buffer = graph.buffers[use.buffer];
    // Of a group that nobody writes the places are unknown, and do not matter.
    const int64_t base = buffer.written || use.writes ? buffer.group_offset : 0;
    ranges.push_back({buffer.group, base + use.first_byte, base + use.end_byte, use.writes});
  }
  return ranges;
}

bool collide(const std::vector<Range>& these, const std::vector<Range>& those) {
  return std::ranges::any_of(these, [&](const Range& a) {
    return std::ranges::any_of(those, [&](const Range& b) {
      return (a.written || b.written) && a.group == b.group && a.begin < b.end && b.begin < a.end;
    });
  });
}

// Waits for the transfer that the node `begin` of `out` begins.
void append_await(uint32_t begin, Graph* out) {
  const Node& node = out->nodes[begin];
  const std::vector<const int64_t*> arguments = graph::items(out->arguments(node));
  Graph call;
  // (outputs, inputs, group, options, ticket) -> (outputs, inputs, ticket)
  for (const int64_t* item : {arguments[0], arguments[1], arguments[4]}) {
    call.words.insert(call.words.end(), item, item + graph::item_words(item));
  }
  Node made = node;
  made.op = node.op->await;
  made.words = 0;
  made.outputs = made.end = static_cast<uint32_t>(call.words.size());
  made.values = 0;
  made.n_values = 0;
  out->append(made, call.words);
}

}  // namespace

bool communicates(const Graph& graph) {
  return std::ranges::any_of(graph.nodes, [](const Node& node) { return node.op->communicates; });
}

Graph overlap_transfers(const Graph& graph) {
  Graph out;
  out.buffers = graph.buffers;
  std::vector<Transfer> under_way;
  int64_t ticket = 0;
  for (const Node& node : graph.nodes) {
    const std::vector<Range> ranges = ranges_of(graph, node);
    std::erase_if(under_way, [&](const Transfer& transfer) {
      if (!collide(transfer.ranges, ranges)) return false;
      append_await(transfer.node, &out);
      return true;
    });
    out.append(node, graph.words);
    if (node.op->await == nullptr) continue;
    const Node& begun = out.nodes.back();
    const int64_t* last = graph::items(out.arguments(begun)).back();
    ACC_CHECK(graph::tag_of(*last) == graph::Tag::kInt);
    out.words[static_cast<size_t>(last - out.words.data()) + 1] = ticket++;
    under_way.push_back({static_cast<uint32_t>(out.nodes.size() - 1), ranges});
  }
  for (const Transfer& transfer : under_way) append_await(transfer.node, &out);
  return out;
}

}  // namespace acc::passes
