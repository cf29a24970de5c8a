#include "lazy/passes/cse.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "csrc/base/hash.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"
#include "lazy/passes/substitution.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;

// A dead result up to this size is kept for the second call: statistics and masks of a few rows.
constexpr uint64_t kKeptBytes = 64 << 10;

class Elimination {
 public:
  Elimination(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph),
        outputs_(outputs),
        uses_(graph),
        read_as_(graph),
        versions_(graph.buffers.size(), 0),
        last_(graph.buffers.size(), 0) {}

  Graph run() {
    Graph out;
    out.buffers = graph_.buffers;
    out.nodes.reserve(graph_.nodes.size());
    out.words.reserve(graph_.words.size());
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) add(i, &out);
    return out;
  }

 private:
  void add(uint32_t index, Graph* out) {
    const Node& node = graph_.nodes[index];
    read_as_.append(graph_, node, out);
    if (may_repeat(node)) {
      std::vector<Definition> made = definitions(graph_, uses_, node, index);
      if (!made.empty()) {
        const uint64_t key = sign(*out, made);
        const auto [begin, end] = calls_.equal_range(key);
        for (auto at = begin; at != end; ++at) {
          if (at->second.key != key_ || !replace(made, at->second.made, index)) continue;
          out->words.resize(out->nodes.back().words);
          out->nodes.pop_back();
          return;
        }
        calls_.emplace(key, Known{key_, std::move(made)});
      }
    }
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (use.writes) versions_[graph_.buffers[use.buffer].group] = index + 1;
    }
  }

  static bool may_repeat(const Node& node) {
    return node.op->mergeable && node.op->removable && node.n_values == 0;
  }

  // Writes into key_ what decides about the results of the last node of `out`: its words with
  // results left unnamed, and who wrote the operands last.
  uint64_t sign(const Graph& out, const std::vector<Definition>& made) {
    const Node& node = out.nodes.back();
    key_.assign({static_cast<int64_t>(node.op->id), static_cast<int64_t>(node.ambient)});
    const auto begin = static_cast<std::ptrdiff_t>(key_.size());
    key_.insert(key_.end(), out.words.begin() + node.words, out.words.begin() + node.end);
    std::vector<int64_t> versions;
    graph::for_each_tensor(key_.data() + begin, key_.data() + key_.size(), [&](int64_t* word) {
      const auto buffer = static_cast<uint32_t>(word[1]);
      if (std::ranges::find(made, buffer, &Definition::buffer) != made.end()) {
        word[1] = -1;
      } else {
        versions.push_back(versions_[graph_.buffers[buffer].group]);
      }
    });
    key_.insert(key_.end(), versions.begin(), versions.end());
    return base::hash64(reinterpret_cast<const uint64_t*>(key_.data()), key_.size());
  }

  // Lets the results of an earlier call stand for `made`. False, with nothing done, where they
  // cannot.
  bool replace(const std::vector<Definition>& made, const std::vector<Definition>& earlier,
               uint32_t index) {
    for (size_t i = 0; i < made.size(); ++i) {
      const uint32_t buffer = made[i].buffer;
      const uint64_t bytes = graph_.buffers[buffer].nbytes;
      if (outputs_[buffer] || bytes != graph_.buffers[earlier[i].buffer].nbytes) return false;
      if (last_use(earlier[i].buffer) < index && bytes > kKeptBytes) return false;
    }
    for (size_t i = 0; i < made.size(); ++i) {
      read_as_.replace(made[i].buffer, earlier[i].buffer);
      last_[earlier[i].buffer] = std::max(last_use(earlier[i].buffer), uses_.last(made[i].buffer));
    }
    return true;
  }

  uint32_t last_use(uint32_t buffer) const {
    if (outputs_[buffer]) return UINT32_MAX;
    return std::max(last_[buffer], uses_.last(buffer));
  }

  struct Known {
    std::vector<int64_t> key;
    std::vector<Definition> made;
  };
  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  Substitution read_as_;
  std::vector<int64_t> versions_;  // per storage: 1 + the node that wrote it last; 0: none did
  std::vector<uint32_t> last_;     // per buffer: the last node that reads it for another
  std::vector<int64_t> key_;
  std::unordered_multimap<uint64_t, Known> calls_;
};

}  // namespace

Graph eliminate_common_calls(const Graph& graph, const std::vector<bool>& outputs) {
  return Elimination(graph, outputs).run();
}

}  // namespace acc::passes
