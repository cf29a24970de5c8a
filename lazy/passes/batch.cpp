#include "lazy/passes/batch.h"

#include <algorithm>
#include <utility>

#include "lazy/graph/edges.h"
#include "lazy/passes/switches.h"

namespace acc::passes {
namespace {

using graph::kNobody;

// A function of one number costs ATen 2 to 4 times what it costs a generated kernel
// (docs/kernel-math.md); below so many elements the call outweighs it.
constexpr int64_t kWorthAlone = 4096;

// A launch that makes more than this much new memory does not move up to an earlier step: the
// memory would be held from there on.
constexpr uint64_t kMaxMovedBytes = 64 << 10;

// Per storage, by its first buffer, the first node that touches it.
std::vector<uint32_t> first_users(const graph::Graph& graph) {
  std::vector<uint32_t> first(graph.buffers.size(), kNobody);
  for (uint32_t node = 0; node < graph.nodes.size(); ++node) {
    for (const graph::Use& use : graph::uses(graph, graph.nodes[node])) {
      uint32_t& user = first[graph.buffers[use.buffer].group];
      if (user == kNobody) user = node;
    }
  }
  return first;
}

// Per buffer, whether anybody but one cluster sees what is in it.
std::vector<bool> find_stored(const graph::Graph& graph, const std::vector<Cluster>& clusters,
                              const std::vector<bool>& outputs) {
  std::vector<bool> seen(graph.buffers.size(), false);  // per storage, by its first buffer
  std::vector<uint32_t> owner(graph.buffers.size(), kNobody);
  for (size_t i = 0; i < graph.buffers.size(); ++i) {
    const graph::Buffer& buffer = graph.buffers[i];
    if (outputs[i] || buffer.kind != graph::BufferKind::kFresh) seen[buffer.group] = true;
  }
  for (uint32_t i = 0; i < clusters.size(); ++i) {
    for (const uint32_t node : clusters[i].nodes) {
      for (const graph::Use& use : graph::uses(graph, graph.nodes[node])) {
        const uint32_t group = graph.buffers[use.buffer].group;
        if (owner[group] != kNobody && owner[group] != i) seen[group] = true;
        owner[group] = i;
      }
    }
  }
  std::vector<bool> stored(graph.buffers.size());
  for (size_t i = 0; i < stored.size(); ++i) stored[i] = seen[graph.buffers[i].group];
  return stored;
}

// Whether the kernel has an operation of which this holds.
bool any(const codegen::KernelSpec& kernel, bool (*holds)(graph::Fn)) {
  return std::ranges::any_of(kernel.instructions, holds, &codegen::Instruction::fn);
}

class Batches {
 public:
  Batches(const graph::Graph& graph, const std::vector<bool>& outputs,
          std::vector<Cluster> clusters, bool alike)
      : graph_(graph),
        clusters_(std::move(clusters)),
        stored_(find_stored(graph, clusters_, outputs)),
        first_user_(first_users(graph)),
        alike_(alike),
        step_of_(graph.nodes.size(), kNobody),
        before_(graph::predecessors(graph)) {}

  std::vector<Batch> run() {
    for (Cluster& cluster : clusters_) add(cluster);
    for (Batch& batch : batches_) {
      std::ranges::sort(batch.nodes);
      if (!is_worth(batch)) batch.launches.clear();
    }
    return std::move(batches_);
  }

 private:
  // A node alone is ATen's, unless its kernel is known to be faster: reductions are, and draws,
  // which no operator can do in the middle of what a GPU captured.
  bool is_worth(const Batch& batch) const {
    if (batch.nodes.size() > 1 || batch.kernel.reduced > 0) return true;
    if (batch.launches.empty()) return false;
    const bool functions = any(batch.kernel, &graph::is_function);
    // ATen's last bits are others. A process that reads a value has its node alone where another
    // process has it in a kernel.
    if (alike_ && (functions || any(batch.kernel, &graph::is_arithmetic))) return true;
    return any(batch.kernel, &graph::is_draw) ||
           (functions && batch.launches.front().elements >= kWorthAlone);
  }

  void add(Cluster& cluster) {
    if (!cluster.elementwise()) return append({cluster.nodes, {}, {}});
    Lowered lowered = lower(graph_, cluster, stored_, alike_);
    // Everything that it needs must be done before the step that it joins.
    uint32_t earliest = 0;
    for (const uint32_t node : cluster.nodes) {
      for (const uint32_t before : before_[node]) {
        if (std::ranges::binary_search(cluster.nodes, before)) continue;
        earliest = std::max(earliest, step_of_[before] + 1);
      }
    }
    const bool moves = enabled(Pass::kBatch) && makes_little(cluster, lowered.launch, &earliest);
    for (uint32_t i = earliest; moves && i < batches_.size(); ++i) {
      Batch& batch = batches_[i];
      if (batch.launches.empty() || !(batch.kernel == lowered.kernel)) continue;
      if (graph_.nodes[batch.nodes[0]].ambient != graph_.nodes[cluster.nodes[0]].ambient) continue;
      batch.launches.push_back(std::move(lowered.launch));
      batch.nodes.insert(batch.nodes.end(), cluster.nodes.begin(), cluster.nodes.end());
      for (const uint32_t node : cluster.nodes) step_of_[node] = i;
      return;
    }
    append({cluster.nodes, std::move(lowered.kernel), {std::move(lowered.launch)}});
  }

  // Whether a launch makes so little new memory that it may move up, as far as what it writes over
  // is there: `earliest` is the first step that it may join.
  bool makes_little(const Cluster& cluster, const Launch& launch, uint32_t* earliest) const {
    uint64_t bytes = 0;
    for (const Launch::Operand& operand : launch.operands) {
      const graph::Buffer& buffer = graph_.buffers[operand.buffer];
      if (!operand.stored || buffer.kind != graph::BufferKind::kFresh) continue;
      const uint32_t user = first_user_[buffer.group];
      if (std::ranges::binary_search(cluster.nodes, user) || step_of_[user] == kNobody) {
        bytes += buffer.nbytes;
      } else {
        *earliest = std::max(*earliest, step_of_[user]);
      }
    }
    return bytes <= kMaxMovedBytes;
  }

  void append(Batch batch) {
    for (const uint32_t node : batch.nodes) step_of_[node] = static_cast<uint32_t>(batches_.size());
    batches_.push_back(std::move(batch));
  }

  const graph::Graph& graph_;
  std::vector<Cluster> clusters_;
  const std::vector<bool> stored_;
  const std::vector<uint32_t> first_user_;  // per storage
  const bool alike_;
  std::vector<uint32_t> step_of_;                    // per node, kNobody until it has one
  const std::vector<std::vector<uint32_t>> before_;  // per node
  std::vector<Batch> batches_;
};

}  // namespace

std::vector<Batch> batch(const graph::Graph& graph, std::vector<Cluster> clusters,
                         const std::vector<bool>& outputs, bool alike) {
  return Batches(graph, outputs, std::move(clusters), alike).run();
}

}  // namespace acc::passes
