#include "lazy/passes/rows.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"
#include "lazy/passes/substitution.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;

// Fewer products are not worth the copies.
constexpr size_t kLeast = 4;

// A product reads its shared matrix, K x N, once more, and its rows, of K elements each, are
// copied: worth it as long as that is a small part. Products of more rows are as fast alone.
constexpr int64_t kPartOfColumns = 8;
constexpr int64_t kMostRows = 64;

// A joint result is held until its last reader is done, so it does not grow beyond what makes its
// product fast.
constexpr int64_t kMostJointRows = 1024;

// Results begin at multiples of this many bytes of the joint one, the widest element: they may be
// read as another type.
constexpr int64_t kAlignment = 16;

// Rows without gaps: the element at (i, j) is at offset + i * columns + j.
struct Matrix {
  uint32_t buffer;
  uint8_t dtype;
  int64_t offset;
  int64_t rows;
  int64_t columns;
};

std::optional<Matrix> as_matrix(const int64_t* word) {
  if (graph::tag_of(*word) != Tag::kTensor) return std::nullopt;
  const graph::TensorWords t = graph::read_tensor(word);
  if (t.sizes.size() != 2 || t.flags != 0 || t.sizes[0] == 0 || t.sizes[1] == 0) {
    return std::nullopt;
  }
  if ((t.sizes[1] > 1 && t.strides[1] != 1) || (t.sizes[0] > 1 && t.strides[0] != t.sizes[1])) {
    return std::nullopt;
  }
  return Matrix{t.buffer, t.dtype, t.offset, t.sizes[0], t.sizes[1]};
}

void push(const Matrix& matrix, std::vector<int64_t>* words) {
  words->insert(words->end(), {graph::make_tag(Tag::kTensor, matrix.dtype, 0, 2), matrix.buffer,
                               matrix.offset, matrix.rows, matrix.columns, matrix.columns, 1});
}

struct Product {
  uint32_t node;
  Matrix left;
  Matrix result;
};

struct Group {
  std::vector<Product> products;
  int64_t rows = 0;
  int64_t ready = -1;  // the last node that wrote an operand
  uint32_t first_use = std::numeric_limits<uint32_t>::max();
};

class Joining {
 public:
  Joining(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph), outputs_(outputs), uses_(graph), read_as_(graph) {}

  Graph run() {
    find_groups();
    if (groups_.empty()) return graph_;
    Graph out;
    out.buffers = graph_.buffers;
    std::vector<bool> gone(graph_.nodes.size(), false);
    std::multimap<uint32_t, const Group*> at;
    for (const Group& group : groups_) {
      at.emplace(group.first_use, &group);
      for (const Product& product : group.products) gone[product.node] = true;
    }
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      for (auto [next, end] = at.equal_range(i); next != end; ++next) emit(*next->second, &out);
      if (!gone[i]) read_as_.append(graph_, graph_.nodes[i], &out);
    }
    return out;
  }

 private:
  void find_groups() {
    std::map<std::vector<int64_t>, std::vector<Group>> open;  // by what the products share
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      if (graph_.nodes[i].op->cat == nullptr) continue;
      const std::optional<Product> product = read(i);
      if (!product.has_value()) continue;
      std::vector<Group>& groups = open[shared_words(i)];
      if (std::ranges::any_of(groups, [&](Group& group) { return join(*product, &group); })) {
        continue;
      }
      Group next;
      if (!join(*product, &next)) continue;
      // A recurrence would begin one group per step.
      if (!groups.empty() && groups.back().products.size() == 1) groups.pop_back();
      groups.push_back(std::move(next));
    }
    for (auto& [shared, groups] : open) {
      for (Group& group : groups) {
        if (group.products.size() >= kLeast) groups_.push_back(std::move(group));
      }
    }
  }

  // (matrix, shared) of mm, (bias, matrix, shared, beta, alpha) of addmm.
  static size_t left_of(const Node& node) { return node.op->arguments.size() == 2 ? 0 : 1; }

  std::optional<Product> read(uint32_t index) const {
    const Node& node = graph_.nodes[index];
    if (node.n_values != 0) return std::nullopt;
    const auto items = graph::items(graph_.arguments(node));
    const size_t left_at = left_of(node);
    // A bias of one row.
    if (left_at == 1 && graph::count_of(*items[0]) != 1) return std::nullopt;
    const auto left = as_matrix(items[left_at]);
    const auto result = as_matrix(graph_.results(node).data());
    if (!left.has_value() || !result.has_value()) return std::nullopt;
    const graph::Buffer& buffer = graph_.buffers[result->buffer];
    const auto touches = uses_.of(result->buffer);
    if (result->rows > kMostRows || result->rows * kPartOfColumns > result->columns ||
        bytes_of(*result) % kAlignment != 0 || outputs_[result->buffer] ||
        buffer.kind != graph::BufferKind::kFresh || buffer.group != result->buffer ||
        touches.front().node != index || touches.size() < 2 ||
        !covers(graph_, graph_.results(node).data())) {
      return std::nullopt;
    }
    return Product{index, *left, *result};
  }

  // Everything of the call but its left operand and its result.
  std::vector<int64_t> shared_words(uint32_t index) const {
    const Node& node = graph_.nodes[index];
    std::vector<int64_t> words{static_cast<int64_t>(node.op->id),
                               static_cast<int64_t>(node.ambient)};
    const auto items = graph::items(graph_.arguments(node));
    for (size_t i = 0; i < items.size(); ++i) {
      if (i != left_of(node)) {
        words.insert(words.end(), items[i], items[i] + graph::item_words(items[i]));
      }
    }
    return words;
  }

  // Adds a product to a group, if there is a place where all operands are ready and no result is
  // used yet.
  bool join(const Product& product, Group* group) const {
    if (group->rows + product.result.rows > kMostJointRows) return false;
    const Node& node = graph_.nodes[product.node];
    const uint32_t first_use = std::min(group->first_use, uses_.of(product.result.buffer)[1].node);
    int64_t ready = group->ready;
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (use.fresh) continue;
      const int64_t writer = uses_.last_write(use.buffer, product.node);
      // A product that may be moved itself.
      if (writer >= 0 && graph_.nodes[static_cast<size_t>(writer)].op->cat != nullptr) return false;
      ready = std::max(ready, writer);
      // Moved down. Moved up, it does not pass a write either, because the last one is before it.
      if (uses_.is_written(use.buffer, product.node, first_use)) return false;
    }
    if (ready >= first_use) return false;
    group->products.push_back(product);
    group->rows += product.result.rows;
    group->ready = ready;
    group->first_use = first_use;
    return true;
  }

  void emit(const Group& group, Graph* out) {
    const Node& model = graph_.nodes[group.products[0].node];
    const Matrix left = add_matrix(group.products[0].left, group.rows, out);
    const Matrix result = add_matrix(group.products[0].result, group.rows, out);

    std::vector<int64_t> parts{graph::make_tag(Tag::kList, 0, 0, group.products.size())};
    for (const Product& product : group.products) push(product.left, &parts);
    parts.insert(parts.end(), {graph::make_tag(Tag::kInt), 0});  // along the rows
    append(model, model.op->cat, std::move(parts), left, out);

    std::vector<int64_t> arguments;
    const auto items = graph::items(graph_.arguments(model));
    for (size_t i = 0; i < items.size(); ++i) {
      if (i == left_of(model)) {
        push(left, &arguments);
      } else {
        arguments.insert(arguments.end(), items[i], items[i] + graph::item_words(items[i]));
      }
    }
    append(model, model.op, std::move(arguments), result, out);

    int64_t bytes = 0;
    for (const Product& product : group.products) {
      read_as_.replace(product.result.buffer, result.buffer, bytes);
      bytes += bytes_of(product.result);
    }
  }

  static int64_t bytes_of(const Matrix& matrix) {
    return matrix.rows * matrix.columns * graph::element_bytes(matrix.dtype);
  }

  // A new buffer for a matrix like `part`, of other rows.
  static Matrix add_matrix(const Matrix& part, int64_t rows, Graph* out) {
    const auto buffer = static_cast<uint32_t>(out->buffers.size());
    const Matrix made{buffer, part.dtype, 0, rows, part.columns};
    out->buffers.push_back(
        {graph::BufferKind::kFresh, static_cast<uint64_t>(bytes_of(made)), buffer, 0, true});
    return made;
  }

  // Adds a call that makes `result`, in the place and under the settings of `model`.
  void append(const Node& model, const graph::Op* op, std::vector<int64_t> arguments,
              const Matrix& result, Graph* out) const {
    Graph call;
    call.words = std::move(arguments);
    Node node = model;
    node.op = op;
    node.words = 0;
    node.outputs = static_cast<uint32_t>(call.words.size());
    push(result, &call.words);
    node.end = static_cast<uint32_t>(call.words.size());
    read_as_.append(call, node, out);
  }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  Substitution read_as_;
  std::vector<Group> groups_;
};

}  // namespace

Graph join_rows(const Graph& graph, const std::vector<bool>& outputs) {
  // Most steps have no candidates, and finding out who uses what takes longer than seeing that.
  const auto products =
      std::ranges::count_if(graph.nodes, [](const Node& node) { return node.op->cat != nullptr; });
  if (static_cast<size_t>(products) < kLeast) return graph;
  return Joining(graph, outputs).run();
}

}  // namespace acc::passes
