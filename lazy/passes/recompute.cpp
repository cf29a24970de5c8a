#include "lazy/passes/recompute.h"

#include <algorithm>
#include <map>

#include "lazy/graph/words.h"
#include "lazy/passes/elementwise.h"
#include "lazy/passes/storage_uses.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::kNobody;
using graph::Node;

// Values of fewer bytes are not worth a look: whole steps of small networks need less.
constexpr uint64_t kLeastBytes = 64 << 10;

// What computing one value again may take, with all that has to be computed again for it. A
// function of one number costs a kernel about 0.3 ns per element, which is less than writing a
// float32 to memory and reading it back.
constexpr size_t kMostNodes = 8;
constexpr size_t kMostFunctions = 1;

class Recomputation {
 public:
  Recomputation(const Graph& graph, const std::vector<Cluster>& clusters,
                const std::vector<bool>& outputs)
      : graph_(graph),
        clusters_(clusters),
        outputs_(outputs),
        uses_(graph),
        cluster_of_(graph.nodes.size()),
        makes_(graph.nodes.size(), kNobody),
        maker_(graph.buffers.size(), kNobody),
        gone_(graph.buffers.size(), false) {
    for (uint32_t i = 0; i < clusters.size(); ++i) {
      for (const uint32_t node : clusters[i].nodes) cluster_of_[node] = i;
    }
  }

  std::optional<Graph> run() {
    find_peak();
    for (uint32_t node = 0; node < graph_.nodes.size(); ++node) consider(node);
    if (wanted_.empty()) return std::nullopt;
    return rewrite();
  }

 private:
  // The cluster at which the most memory is held. What a single cluster touches stays in registers.
  void find_peak() {
    std::vector<int64_t> change(clusters_.size() + 1, 0);
    for (uint32_t i = 0; i < graph_.buffers.size(); ++i) {
      const graph::Buffer& buffer = graph_.buffers[i];
      if (buffer.kind != graph::BufferKind::kFresh || buffer.group != i) continue;
      const auto [first, last] = span_of(i);
      if (first == last || first == kNobody) continue;
      change[first] += static_cast<int64_t>(buffer.nbytes);
      change[last + 1] -= static_cast<int64_t>(buffer.nbytes);
    }
    int64_t held = 0;
    int64_t most = 0;
    for (uint32_t i = 0; i < clusters_.size(); ++i) {
      held += change[i];
      if (held > most) peak_ = i;
      most = std::max(most, held);
    }
  }

  // The first and the last cluster that touch a storage; the user holds outputs to the end.
  std::pair<uint32_t, uint32_t> span_of(uint32_t buffer) const {
    uint32_t first = kNobody;
    uint32_t last = 0;
    for (const StorageUses::Touch& touch : uses_.of(buffer)) {
      first = std::min(first, cluster_of_[touch.node]);
      last = std::max(last, cluster_of_[touch.node]);
    }
    if (outputs_[buffer]) last = static_cast<uint32_t>(clusters_.size()) - 1;
    return {first, last};
  }

  // Whether kernels can compute what the node defines from its operands, element by element.
  bool is_simple(const Node& node) const {
    const auto found = as_elementwise(graph_, node);
    return found.has_value() && !found->nest.reduces() && found->results.size() == 1;
  }

  size_t functions_of(const Node& node) const {
    return static_cast<size_t>(
        std::ranges::count_if(graph::formula_of(graph_, node)->terms,
                              [](const graph::Term& term) { return graph::is_function(term.fn); }));
  }

  // Plans to compute the value of a node again, if that is possible and saves memory at the peak.
  void consider(uint32_t index) {
    const Node& node = graph_.nodes[index];
    if (!clusters_[cluster_of_[index]].elementwise() || cluster_of_[index] >= peak_) return;
    const std::vector<Definition> made = definitions(graph_, uses_, node, index);
    if (made.size() != 1 || outputs_[made[0].buffer] || !is_simple(node)) return;
    const uint32_t buffer = made[0].buffer;
    makes_[index] = buffer;
    maker_[buffer] = index;
    if (graph_.buffers[buffer].nbytes < kLeastBytes) return;
    const auto reader = find_late_reader(buffer);
    if (!reader.has_value()) return;
    Chain chain{*reader, cluster_of_[*reader], {}, 0};
    if (!add(index, 1, &chain) || chain.functions > kMostFunctions) return;
    std::vector<uint32_t>& nodes = wanted_[chain.reader];
    nodes.insert(nodes.end(), chain.nodes.begin(), chain.nodes.end());
    gone_[buffer] = true;
  }

  // The first of those that read a value after the peak, if it is elementwise and all others of
  // them are in its cluster. None where the value is read at the peak.
  std::optional<uint32_t> find_late_reader(uint32_t buffer) const {
    std::optional<uint32_t> reader;
    for (const StorageUses::Touch& touch : uses_.of(buffer)) {
      const uint32_t at = cluster_of_[touch.node];
      if (at < peak_) continue;
      if (at == peak_ || !clusters_[at].elementwise()) return std::nullopt;
      if (reader.has_value() && at != cluster_of_[*reader]) return std::nullopt;
      if (!reader.has_value()) reader = touch.node;
    }
    return reader;
  }

  struct Chain {
    uint32_t reader;   // before which it comes
    uint32_t cluster;  // for which it is
    std::vector<uint32_t> nodes;
    size_t functions;
  };

  // Adds a node to a chain, behind those whose values it needs and that are not there then. `depth`
  // nodes, this one included, come after those.
  bool add(uint32_t index, size_t depth, Chain* chain) const {
    if (depth > kMostNodes) return false;
    if (std::ranges::find(chain->nodes, index) != chain->nodes.end()) return true;
    const Node& node = graph_.nodes[index];
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (use.fresh || use.buffer == makes_[index]) continue;
      if (uses_.is_written(use.buffer, index + 1, chain->reader)) return false;
      if (is_there(use.buffer, chain->cluster)) continue;
      const uint32_t maker = maker_[use.buffer];
      if (maker == kNobody || !add(maker, depth + 1, chain)) return false;
    }
    chain->nodes.push_back(index);
    chain->functions += functions_of(node);
    return chain->nodes.size() <= kMostNodes;
  }

  // Whether a buffer is held until a cluster runs, whatever is recomputed.
  bool is_there(uint32_t buffer, uint32_t cluster) const {
    // What the step was given too: it may be the only one that still holds it.
    const uint32_t group = graph_.buffers[buffer].group;
    return !gone_[group] && span_of(group).second >= cluster;
  }

  Graph rewrite() const {
    Graph out;
    out.buffers = graph_.buffers;
    // Per cluster, the buffers that its nodes read instead of others.
    std::map<uint32_t, std::map<uint32_t, uint32_t>> instead;
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      auto& by = instead[cluster_of_[i]];
      if (const auto found = wanted_.find(i); found != wanted_.end()) {
        for (const uint32_t again : found->second) {
          const uint32_t made = makes_[again];
          if (by.contains(made)) continue;
          const auto copy = static_cast<uint32_t>(out.buffers.size());
          out.buffers.push_back(graph_.buffers[made]);
          out.buffers.back().group = copy;
          by[made] = copy;
          append(graph_.nodes[again], by, &out);
          out.nodes.back().again = true;
          out.nodes.back().seen = is_kept(made, {cluster_of_[again], cluster_of_[i]});
        }
      }
      append(graph_.nodes[i], by, &out);
    }
    return out;
  }

  // Whether a buffer is still stored: for others than its maker and who makes it again.
  bool is_kept(uint32_t buffer, std::initializer_list<uint32_t> makers) const {
    return outputs_[buffer] ||
           std::ranges::any_of(uses_.of(buffer), [&](const StorageUses::Touch& touch) {
             return std::ranges::find(makers, cluster_of_[touch.node]) == makers.end();
           });
  }

  void append(const Node& node, const std::map<uint32_t, uint32_t>& by, Graph* out) const {
    out->append(node, graph_.words);
    const Node& added = out->nodes.back();
    graph::for_each_tensor(out->words.data() + added.words, out->words.data() + added.end,
                           [&](int64_t* word) {
                             const auto found = by.find(static_cast<uint32_t>(word[1]));
                             if (found != by.end()) word[1] = found->second;
                           });
  }

  const Graph& graph_;
  const std::vector<Cluster>& clusters_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  std::vector<uint32_t> cluster_of_;  // per node
  std::vector<uint32_t> makes_;       // per node: what it can compute again
  std::vector<uint32_t> maker_;       // per buffer: the node that can
  // Per buffer: was kept until its last readers, and is not any more. What else a chain computes
  // again was not kept.
  std::vector<bool> gone_;
  uint32_t peak_ = 0;
  std::map<uint32_t, std::vector<uint32_t>> wanted_;  // nodes to repeat, by what they come before
};

}  // namespace

std::optional<Graph> recompute(const Graph& graph, const std::vector<Cluster>& clusters,
                               const std::vector<bool>& outputs) {
  return Recomputation(graph, clusters, outputs).run();
}

}  // namespace acc::passes
