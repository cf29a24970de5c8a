#include "lazy/passes/lists.h"

#include <algorithm>
#include <optional>
#include <span>
#include <unordered_map>

#include "lazy/graph/edges.h"
#include "lazy/graph/words.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;

constexpr uint8_t kFloat32 = 6;  // c10's numbering

// The words of each item of a call's lists; everything that is not a list is in all of them.
struct Split {
  uint32_t items = 0;
  std::vector<Node> nodes;  // one per item, with words in `words`
  std::vector<int64_t> words;
};

class Splitter {
 public:
  Splitter(const Graph& graph, const Node& node) : graph_(graph), node_(node) {}

  // Nothing when the call has no form for single items.
  std::optional<Split> run() {
    if (node_.op->item == nullptr || !measure()) return std::nullopt;
    const std::vector<const int64_t*> arguments = graph::items(graph_.arguments(node_));
    const std::vector<const int64_t*> results = graph::items(graph_.results(node_));
    Split split;
    split.items = items_;
    for (uint32_t i = 0; i < items_; ++i) {
      Node part = node_;
      part.op = with_number_ ? node_.op->item_with_number : node_.op->item;
      part.words = static_cast<uint32_t>(split.words.size());
      part.n_values = 0;
      for (const graph::Op::ItemArgument& argument : node_.op->item_arguments) {
        if (argument.from < 0) {
          split.words.insert(split.words.end(), argument.words.begin(), argument.words.end());
        } else {
          append(arguments[static_cast<size_t>(argument.from)], i, part, split.words);
        }
      }
      part.outputs = static_cast<uint32_t>(split.words.size());
      for (const int64_t* result : results) append(result, i, part, split.words);
      part.end = static_cast<uint32_t>(split.words.size());
      split.nodes.push_back(part);
    }
    return split;
  }

 private:
  const int64_t* begin() const { return graph_.words.data() + node_.words; }
  const int64_t* end() const { return graph_.words.data() + node_.end; }

  // A number that kernels do not get as an argument.
  static bool is_structure(const int64_t* word) {
    return graph::tag_of(*word) == Tag::kInt && graph::item_values(word) == 0;
  }

  // Counts the items; false where the lists do not match.
  bool measure() {
    int with_values = 0;
    with_number_ = node_.op->item_with_number != nullptr;
    for (const int64_t* word = begin(); word != end(); word += graph::item_words(word)) {
      with_values += graph::item_values(word) > 0 ? 1 : 0;
      with_number_ &= !is_structure(word);
      if (graph::tag_of(*word) != Tag::kList) continue;
      const uint32_t items = graph::count_of(*word);
      if (items_ != 0 && items != items_) return false;
      items_ = items;
      const int64_t* item = word + 1;
      for (uint32_t i = 0; i < items; ++i, item += graph::item_words(item)) {
        const bool tensor = graph::tag_of(*item) == Tag::kTensor;
        with_number_ &= !tensor || graph::dtype_of(*item) == kFloat32;
        with_number_ &= !is_structure(item);
      }
    }
    // The values of an item must be neighbours in the value block.
    return items_ > 0 && with_values <= 1;
  }

  void append(const int64_t* word, uint32_t index, Node& part, std::vector<int64_t>& words) const {
    const int64_t* item = word;
    uint32_t skipped_values = 0;
    if (graph::tag_of(*word) == Tag::kList) {
      item = word + 1;
      for (uint32_t i = 0; i < index; ++i, item += graph::item_words(item)) {
        skipped_values += graph::item_values(item);
      }
    }
    if (const uint32_t values = graph::item_values(item); values > 0) {
      part.values = node_.values + skipped_values;
      part.n_values = values;
    }
    const size_t at = words.size();
    words.insert(words.end(), item, item + graph::item_words(item));
    if (with_number_) words[at] = graph::as_number(words[at]);
  }

  const Graph& graph_;
  const Node& node_;
  uint32_t items_ = 0;
  bool with_number_ = false;
};

// Neighbouring calls whose items are independent of each other.
class Run {
 public:
  explicit Run(const Graph& graph) : graph_(graph) {}

  bool empty() const { return splits_.empty(); }

  // False, with the run unchanged, when items of the call touch what other items touch.
  bool add(Split split, const Graph& lowered) {
    if (!empty() && split.items != splits_.front().items) return false;
    auto touched = touched_;
    for (uint32_t i = 0; i < split.items; ++i) {
      for (const graph::Use& use : graph::uses(lowered, split.nodes[i])) {
        std::vector<Touch>& touches = touched[graph_.buffers[use.buffer].group];
        const Touch made{graph::place_of(graph_, use), i, use.writes};
        if (std::ranges::any_of(touches, [&](const Touch& is) { return collide(is, made); })) {
          return false;
        }
        if (std::ranges::find(touches, made) == touches.end()) touches.push_back(made);
      }
    }
    touched_ = std::move(touched);
    splits_.push_back(std::move(split));
    return true;
  }

  // Puts the calls into `out`, item by item.
  void flush(Graph* out) {
    for (uint32_t i = 0; !empty() && i < splits_.front().items; ++i) {
      for (const Split& split : splits_) out->append(split.nodes[i], split.words);
    }
    splits_.clear();
    touched_.clear();
  }

 private:
  struct Touch {
    graph::Bytes bytes;  // of the storage
    uint32_t item;
    bool written;
    bool operator==(const Touch&) const = default;
  };

  static bool collide(const Touch& a, const Touch& b) {
    return a.item != b.item && (a.written || b.written) && a.bytes.begin < b.bytes.end &&
           b.bytes.begin < a.bytes.end;
  }

  const Graph& graph_;
  std::vector<Split> splits_;
  std::unordered_map<uint32_t, std::vector<Touch>> touched_;  // by storage
};

}  // namespace

Graph run_lists_by_item(const Graph& graph, const std::vector<bool>& stays, bool split) {
  Graph out;
  out.buffers = graph.buffers;
  Run run(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!stays[i]) continue;
    std::optional<Split> items;
    if (split) items = Splitter(graph, graph.nodes[i]).run();
    if (items.has_value()) {
      Graph lowered;  // for `uses`, which wants words and nodes together
      lowered.words = items->words;
      if (run.add(*items, lowered)) continue;
      run.flush(&out);
      if (run.add(std::move(*items), lowered)) continue;
    }
    run.flush(&out);
    out.append(graph.nodes[i], graph.words);
  }
  run.flush(&out);
  return out;
}

}  // namespace acc::passes
