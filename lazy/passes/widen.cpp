#include "lazy/passes/widen.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/conversions.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;
using graph::TensorWords;

// A tensor as words: tag, buffer, offset, sizes, strides.
using Words = std::vector<int64_t>;

bool is_widened(const graph::Op& op, const int64_t* word) {
  if (graph::tag_of(*word) != Tag::kTensor) return false;
  const uint8_t dtype = graph::dtype_of(*word);
  return dtype == graph::dtype::kF16 || (dtype == graph::dtype::kBF16 && !op.multiplies_bf16);
}

// The operands and results that are converted. Where a call names the type of its result, or takes
// tensors in lists, it is left alone.
bool widens(const Graph& graph, const Node& node) {
  if (node.op->copy == nullptr) return false;
  bool half = false;
  size_t i = 0;
  for (const int64_t* item : graph::items(graph.arguments(node))) {
    const graph::Argument& argument = node.op->arguments[i++];
    if (argument.is_type && graph::tag_of(*item) != Tag::kNone) return false;
    if (argument.list == graph::ListOf::kTensor) return false;
    half |= is_widened(*node.op, item);
  }
  return half;
}

class Widening {
 public:
  explicit Widening(const Graph& graph) : graph_(graph) {}

  Graph run() {
    out_.buffers = graph_.buffers;
    for (const Node& node : graph_.nodes) {
      if (widens(graph_, node)) {
        widen(node);
      } else {
        out_.append(node, graph_.words);
      }
      forget_written(node);
    }
    return std::move(out_);
  }

 private:
  void widen(const Node& node) {
    Words words(graph_.words.begin() + node.words, graph_.words.begin() + node.end);
    // What the node writes, and where the result of that type belongs.
    std::vector<std::pair<Words, Words>> made;
    const auto put_wide = [&](const int64_t* item, bool read, bool written) {
      if (!is_widened(*node.op, item)) return;
      int64_t* at = words.data() + (item - (graph_.words.data() + node.words));
      Words half(item, item + graph::item_words(item));
      const Words wide = read && !written ? converted(node, half) : fresh(half);
      if (read && written) put_copy(&out_, node.op->copy, node, wide, half);
      std::ranges::copy(wide, at);
      if (written) made.emplace_back(std::move(half), wide);
    };
    size_t i = 0;
    for (const int64_t* item : graph::items(graph_.arguments(node))) {
      put_wide(item, true, node.op->arguments[i++].writes);
    }
    for (const int64_t* item : graph::items(graph_.results(node))) put_wide(item, false, true);
    Node call = node;
    call.outputs -= node.words;
    call.end -= node.words;
    call.words = 0;
    out_.append(call, words);
    for (const auto& [half, wide] : made) put_copy(&out_, node.op->copy, node, half, wide);
  }

  // Of `half`, in float32, in memory of its own: in the order of its dimensions in memory, so that
  // a matrix and its transpose are one.
  Words converted(const Node& node, const Words& half) {
    const TensorWords t = graph::read_tensor(half.data());
    std::vector<uint32_t> order(t.sizes.size());
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) {
      return t.strides[a] > t.strides[b] ||
             (t.strides[a] == t.strides[b] && t.sizes[a] > t.sizes[b]);
    });
    const Words region = permuted(half, order);
    auto found = converted_.find(region);
    if (found == converted_.end()) {
      const Words wide = fresh(region);
      put_copy(&out_, node.op->copy, node, wide, region);
      found = converted_.emplace(region, wide).first;
    }
    std::vector<uint32_t> back(order.size());
    for (uint32_t i = 0; i < order.size(); ++i) back[order[i]] = i;
    return permuted(found->second, back);
  }

  static Words permuted(const Words& tensor, const std::vector<uint32_t>& order) {
    Words made(tensor);
    const size_t dims = order.size();
    for (size_t i = 0; i < dims; ++i) {
      made[3 + i] = tensor[3 + order[i]];
      made[3 + dims + i] = tensor[3 + dims + order[i]];
    }
    return made;
  }

  // New memory for a float32 tensor of the shape of `half`, with its strides where they leave no
  // gaps.
  Words fresh(const Words& half) {
    const TensorWords t = graph::read_tensor(half.data());
    const size_t dims = t.sizes.size();
    std::vector<uint32_t> order(dims);
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::stable_sort(order,
                             [&](uint32_t a, uint32_t b) { return t.strides[a] > t.strides[b]; });
    Words wide(half);
    wide[0] = graph::make_tag(Tag::kTensor, graph::dtype::kF32, 0, dims);
    int64_t stride = 1;
    for (size_t i = dims; i-- > 0; stride *= std::max<int64_t>(t.sizes[order[i]], 1)) {
      wide[3 + dims + order[i]] = stride;
    }
    const int64_t elements =
        std::accumulate(t.sizes.begin(), t.sizes.end(), int64_t{1}, std::multiplies<>());
    wide[1] = add_buffer(
        &out_, static_cast<uint64_t>(elements) * graph::element_bytes(graph::dtype::kF32));
    wide[2] = 0;
    return wide;
  }

  void forget_written(const Node& node) {
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (!use.writes) continue;
      const uint32_t group = graph_.buffers[use.buffer].group;
      std::erase_if(converted_, [&](const auto& entry) {
        return graph_.buffers[static_cast<size_t>(entry.first[1])].group == group;
      });
    }
  }

  const Graph& graph_;
  Graph out_;
  std::map<Words, Words> converted_;  // operands in float32, by what they were made from
};

}  // namespace

Graph widen_products(const Graph& graph) {
  if (std::ranges::none_of(graph.nodes, [&](const Node& node) { return widens(graph, node); })) {
    return graph;
  }
  return Widening(graph).run();
}

}  // namespace acc::passes
