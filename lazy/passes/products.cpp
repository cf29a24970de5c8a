#include "lazy/passes/products.h"

#include <optional>
#include <vector>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;
using graph::TensorWords;

// The other call costs 5 to 10 us more; from so many multiplications on it is faster for nearly all
// shapes that were measured, which have at least so many rows (docs/performance.md).
constexpr int64_t kLeastMultiplications = int64_t{1} << 25;
constexpr int64_t kLeastRows = 64;

bool is_one(const int64_t* word) {
  return graph::tag_of(*word) == Tag::kInt && graph::flags_of(*word) == 0 && word[1] == 1;
}

// A float32 tensor of that many dimensions.
std::optional<TensorWords> read(const int64_t* word, size_t dims) {
  if (graph::tag_of(*word) != Tag::kTensor) return std::nullopt;
  const TensorWords tensor = graph::read_tensor(word);
  if (tensor.dtype != graph::dtype::kF32 || tensor.flags != 0 || tensor.sizes.size() != dims) {
    return std::nullopt;
  }
  return tensor;
}

// Whether the rows of a matrix lie one behind the other, or its columns do, without overlap. A left
// matrix with gaps would be copied.
bool has_rows(const TensorWords& t) { return t.strides[1] == 1 && t.strides[0] >= t.sizes[1]; }
bool has_columns(const TensorWords& t) { return t.strides[0] == 1 && t.strides[1] >= t.sizes[0]; }
bool has_gaps(const TensorWords& t) { return t.strides[0] != t.sizes[1]; }

// The arguments of the call that does the same as `node`; empty where it stays as it is.
//
// linear(left, transposed right, bias or None), for mm(left, right) and
// addmm(bias, left, right, beta, alpha).
std::vector<int64_t> as_linear(const Graph& graph, const Node& node) {
  if (node.op->linear == nullptr || node.n_values != 0) return {};
  const auto items = graph::items(graph.arguments(node));
  const bool biased = items.size() == 5;
  if (biased && !(is_one(items[3]) && is_one(items[4]))) return {};
  const size_t at = biased ? 1 : 0;
  const auto left = read(items[at], 2);
  const auto right = read(items[at + 1], 2);
  const int64_t* made = graph.results(node).data();
  if (!left || !right || !read(made, 2) || !covers(graph, made)) return {};
  if (!has_rows(*left) || has_gaps(*left) || !(has_rows(*right) || has_columns(*right))) return {};
  const int64_t rows = left->sizes[0];
  const int64_t columns = right->sizes[1];
  if (rows < kLeastRows || rows * left->sizes[1] * columns < kLeastMultiplications) return {};
  if (biased) {
    const auto bias = read(items[0], 1);
    if (!bias || bias->sizes[0] != columns || bias->strides[0] != 1) return {};
  }

  std::vector<int64_t> words(items[at], items[at] + graph::item_words(items[at]));
  words.insert(words.end(), {*items[at + 1], right->buffer, right->offset, columns, right->sizes[0],
                             right->strides[1], right->strides[0]});
  if (biased) {
    words.insert(words.end(), items[0], items[0] + graph::item_words(items[0]));
  } else {
    words.push_back(graph::make_tag(Tag::kNone));
  }
  return words;
}

}  // namespace

Graph choose_products(const Graph& graph) {
  Graph out;
  out.buffers = graph.buffers;
  for (const Node& node : graph.nodes) {
    const std::vector<int64_t> arguments = as_linear(graph, node);
    if (arguments.empty()) {
      out.append(node, graph.words);
      continue;
    }
    Graph call;
    call.words = arguments;
    Node made = node;
    made.op = node.op->linear;
    made.words = 0;
    made.outputs = static_cast<uint32_t>(call.words.size());
    const auto results = graph.results(node);
    call.words.insert(call.words.end(), results.begin(), results.end());
    made.end = static_cast<uint32_t>(call.words.size());
    out.append(made, call.words);
  }
  return out;
}

}  // namespace acc::passes
