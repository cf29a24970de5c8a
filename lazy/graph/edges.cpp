#include "lazy/graph/edges.h"

#include <algorithm>
#include <map>

namespace acc::graph {
namespace {

// Bytes with the same history.
struct Segment {
  int64_t end = 0;
  uint32_t writer = kNobody;
  std::vector<uint32_t> readers;  // since the last write
};

// A storage as segments by their first byte.
class History {
 public:
  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& each) {
    split(begin);
    split(end);
    for (int64_t at = begin; at < end;) {
      auto found = segments_.lower_bound(at);
      if (found == segments_.end() || found->first != at) {
        const int64_t gap = found == segments_.end() ? end : std::min(end, found->first);
        found = segments_.emplace(at, Segment{gap, kNobody, {}}).first;
      }
      each(found->second);
      at = found->second.end;
    }
  }

 private:
  void split(int64_t at) {
    auto after = segments_.upper_bound(at);
    if (after == segments_.begin()) return;
    const auto segment = std::prev(after);
    if (segment->first == at || segment->second.end <= at) return;
    segments_.emplace(at, segment->second);
    segment->second.end = at;
  }

  std::map<int64_t, Segment> segments_;
};

}  // namespace

Bytes place_of(const Graph& graph, const Use& use) {
  const Buffer& buffer = graph.buffers[use.buffer];
  const int64_t base = buffer.written || use.writes ? buffer.group_offset : 0;
  return {base + use.first_byte, base + use.end_byte};
}

std::vector<Edge> edges(const Graph& graph) {
  std::vector<History> histories(graph.buffers.size());
  std::vector<Edge> found;
  uint32_t transfer = kNobody;  // the last node that communicates
  const Op* await = nullptr;    // what waits for it
  std::map<int64_t, uint32_t> begun;
  for (uint32_t node = 0; node < graph.nodes.size(); ++node) {
    const auto depend = [&](uint32_t on, Hazard hazard) {
      if (on != kNobody && on != node) found.push_back({on, node, hazard});
    };
    const Op* op = graph.nodes[node].op;
    if (op->communicates) {
      depend(transfer, Hazard::kTransferOrder);
      transfer = node;
    }
    if (op->await != nullptr) {
      await = op->await;
      begun[transfer_ticket(graph, graph.nodes[node])] = node;
    } else if (op == await) {
      depend(begun.at(transfer_ticket(graph, graph.nodes[node])), Hazard::kTransferEnd);
    }
    const std::vector<Use> all = uses(graph, graph.nodes[node]);
    const auto visit = [&](const Use& use, const auto& each) {
      const Bytes bytes = place_of(graph, use);
      histories[graph.buffers[use.buffer].group].visit(bytes.begin, bytes.end, each);
    };
    for (const Use& use : all) {
      if (!use.reads) continue;
      visit(use, [&](Segment& segment) {
        depend(segment.writer, Hazard::kReadAfterWrite);
        if (segment.readers.empty() || segment.readers.back() != node) {
          segment.readers.push_back(node);
        }
      });
    }
    for (const Use& use : all) {
      if (!use.writes) continue;
      visit(use, [&](Segment& segment) {
        for (const uint32_t reader : segment.readers) depend(reader, Hazard::kWriteAfterRead);
        depend(segment.writer, Hazard::kWriteAfterWrite);
        segment.writer = node;
        segment.readers.clear();
      });
    }
  }
  std::ranges::sort(found);
  const auto rest = std::ranges::unique(found);
  found.erase(rest.begin(), rest.end());
  return found;
}

std::vector<std::vector<uint32_t>> predecessors(const Graph& graph) {
  std::vector<std::vector<uint32_t>> before(graph.nodes.size());
  // Sorted by the earlier node, so those of one node come in order, once per hazard.
  for (const Edge& edge : edges(graph)) {
    if (before[edge.to].empty() || before[edge.to].back() != edge.from) {
      before[edge.to].push_back(edge.from);
    }
  }
  return before;
}

}  // namespace acc::graph
