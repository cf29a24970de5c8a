#include "lazy/passes/split.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "lazy/graph/words.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;

// Operators with output_mask as the last argument, of whose results the first is the input's
// gradient.
constexpr std::array kSplit{std::string_view("aten::native_layer_norm_backward"),
                            std::string_view("aten::native_group_norm_backward")};

// Appends the call with only those results whose place in the mask is in `wanted`.
void append_masked(const Graph& graph, const Node& node, const std::vector<bool>& wanted,
                   Graph* out) {
  const auto put = [out](const int64_t* item) {
    out->words.insert(out->words.end(), item, item + graph::item_words(item));
  };
  const auto arguments = graph::items(graph.arguments(node));
  const auto results = graph::items(graph.results(node));
  Node made = node;
  made.words = static_cast<uint32_t>(out->words.size());
  for (const int64_t* item : arguments) put(item);
  // The mask: a list of truths, two words each.
  const size_t mask = out->words.size() - 2 * wanted.size();
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) out->words[mask + 2 * i + 1] = 0;
  }
  made.outputs = static_cast<uint32_t>(out->words.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (wanted[i]) {
      put(results[i]);
    } else {
      out->words.push_back(graph::make_tag(Tag::kUndefined));
    }
  }
  made.end = static_cast<uint32_t>(out->words.size());
  out->nodes.push_back(made);
}

// In the order of its dimensions, also where the stride of one of a single element says nothing.
bool is_plain(const int64_t* word) {
  if (graph::tag_of(*word) != Tag::kTensor) return false;
  const graph::TensorWords tensor = graph::read_tensor(word);
  int64_t stride = 1;
  for (size_t i = tensor.sizes.size(); i-- > 0; stride *= tensor.sizes[i]) {
    if (tensor.strides[i] != stride) return false;
  }
  return true;
}

bool is_split(const Graph& graph, const Node& node) {
  if (std::ranges::find(kSplit, node.op->name) == kSplit.end()) return false;
  const auto results = graph::items(graph.results(node));
  const auto arguments = graph::items(graph.arguments(node));
  // ATen's group norm, where it takes images for channels last, ends the process when it is not
  // asked for their gradient (torch 2.11).
  if (node.op->name == "aten::native_group_norm_backward" &&
      !(is_plain(arguments[0]) && is_plain(arguments[1]))) {
    return false;
  }
  const auto wanted = std::ranges::count_if(
      results, [](const int64_t* item) { return graph::tag_of(*item) == Tag::kTensor; });
  return wanted > 1 && graph::tag_of(*results[0]) == Tag::kTensor;
}

}  // namespace

Graph split_backwards(const Graph& graph) {
  Graph out;
  out.buffers = graph.buffers;
  for (const Node& node : graph.nodes) {
    if (!is_split(graph, node)) {
      out.append(node, graph.words);
      continue;
    }
    std::vector<bool> wanted(graph::items(graph.results(node)).size(), true);
    std::fill(wanted.begin() + 1, wanted.end(), false);
    append_masked(graph, node, wanted, &out);
    wanted.flip();
    append_masked(graph, node, wanted, &out);
  }
  return out;
}

}  // namespace acc::passes
