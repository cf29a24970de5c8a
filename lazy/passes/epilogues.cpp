#include "lazy/passes/epilogues.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "csrc/base/env.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"

namespace acc::passes {
namespace {

namespace dtype = graph::dtype;
using graph::Graph;
using graph::kNobody;
using graph::Node;
using graph::Op;
using graph::Tag;
using graph::TensorWords;

bool is_factor_one(const int64_t* word) {
  return graph::tag_of(*word) == Tag::kInt && graph::flags_of(*word) == 0 && word[1] == 1;
}

bool is_tanh(const int64_t* word) {
  constexpr std::string_view kTanh = "tanh";
  return graph::tag_of(*word) == Tag::kString && graph::count_of(*word) == kTanh.size() &&
         std::string_view(reinterpret_cast<const char*>(word + 1), kTanh.size()) == kTanh;
}

// The list of the one dimension 0.
bool is_first_dimension(const int64_t* word) {
  return graph::tag_of(*word) == Tag::kList && graph::count_of(*word) == 1 &&
         graph::tag_of(word[1]) == Tag::kInt && graph::flags_of(word[1]) == 0 && word[2] == 0;
}

// An epilogue takes the function of what was accumulated, which in half precision is a rounding
// less than eager's two calls, and computes tanh in its own way.
bool takes_gelu() { return !base::env::exact(); }

std::optional<TensorWords> read_operand(const int64_t* word) {
  if (graph::tag_of(*word) != Tag::kTensor) return std::nullopt;
  const TensorWords tensor = graph::read_tensor(word);
  if (tensor.flags != 0) return std::nullopt;
  if (tensor.dtype != dtype::kF32 && !dtype::is_half(tensor.dtype)) return std::nullopt;
  return tensor;
}

int64_t element_count(const TensorWords& tensor) {
  int64_t product = 1;
  for (const int64_t size : tensor.sizes) product *= size;
  return product;
}

// Whether the elements follow each other in row-major order, whatever the sizes.
bool is_dense(const TensorWords& tensor) {
  int64_t expected = 1;
  for (size_t i = tensor.sizes.size(); i-- > 0;) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.sizes[i];
  }
  return true;
}

// A matrix of dense rows, as the words of a call say it.
struct DenseMatrix {
  uint32_t buffer = 0;
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  uint8_t type = 0;

  bool operator==(const DenseMatrix&) const = default;
};

// The same elements in the same order as a matrix of so many columns.
std::optional<DenseMatrix> as_dense_matrix(const int64_t* word, int64_t columns) {
  const auto tensor = read_operand(word);
  if (!tensor || !is_dense(*tensor) || columns <= 0 || element_count(*tensor) % columns != 0) {
    return std::nullopt;
  }
  return DenseMatrix{tensor->buffer, tensor->offset, element_count(*tensor) / columns, columns,
                     tensor->dtype};
}

class Epilogues {
 public:
  Epilogues(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph), outputs_(outputs), uses_(graph), made_(graph.nodes.size()) {}

  Graph run() {
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      const std::string& name = graph_.nodes[i].op->name;
      if (name == "aten::relu") join_relu(i);
      if (name == "aten::gelu") join_gelu(i);
      if (name == "aten::gelu_backward") join_gelu_backward(i);
      if (name == "aten::sum.dim_IntList") join_sum(i);
    }
    Graph out;
    out.buffers = graph_.buffers;
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      if (made_[i].gone) continue;
      if (made_[i].op == nullptr) {
        out.append(graph_.nodes[i], graph_.words);
      } else {
        append(made_[i], graph_.nodes[i], &out);
      }
    }
    return out;
  }

 private:
  // What becomes of a node.
  struct Made {
    bool gone = false;
    const Op* op = nullptr;  // null: it stays as it is
    uint32_t like = 0;       // the node whose settings and place in the program it has
    std::vector<int64_t> arguments;
    std::vector<int64_t> results;
  };

  std::vector<const int64_t*> arguments(uint32_t index) const {
    return graph::items(graph_.arguments(graph_.nodes[index]));
  }
  bool is_free(uint32_t index) const { return !made_[index].gone && made_[index].op == nullptr; }

  // The product that fills the buffer and that nothing has changed before the node `user` reads it;
  // kNobody if there is none. `alone`: nobody else reads it.
  uint32_t product_of(uint32_t buffer, uint32_t user, bool alone) const {
    const auto users = uses_.of(buffer);
    const uint32_t index = users.front().node;
    if (index >= user || !users.front().writes || !is_free(index)) return kNobody;
    if (alone && (outputs_[buffer] || users.size() != 2)) return kNobody;
    if (uses_.is_written(buffer, index + 1, user)) return kNobody;
    const auto results = graph_.results(graph_.nodes[index]);
    if (results.empty()) return kNobody;  // it writes an argument
    const int64_t* result = results.data();
    const bool whole = graph::tag_of(*result) == Tag::kTensor &&
                       graph::read_tensor(result).buffer == buffer && covers(graph_, result) &&
                       graph::count_of(*result) == 2 && is_dense(graph::read_tensor(result));
    return whole ? index : kNobody;
  }

  // addmm(bias, left, right) with nothing but the bias, a row.
  bool is_linear(uint32_t index) const {
    const auto items = arguments(index);
    if (items.size() != 5 || !is_factor_one(items[3]) || !is_factor_one(items[4])) return false;
    if (graph_.nodes[index].n_values != 0) return false;
    const auto bias = read_operand(items[0]);
    const auto right = read_operand(items[2]);
    return bias && bias->sizes.size() == 1 && bias->strides[0] == 1 && read_operand(items[1]) &&
           right && right->sizes.size() == 2 && bias->sizes[0] == right->sizes[1];
  }

  static void put(const int64_t* item, std::vector<int64_t>* words) {
    words->insert(words->end(), item, item + graph::item_words(item));
  }
  static void put(const DenseMatrix& m, std::vector<int64_t>* words) {
    words->insert(words->end(), {graph::make_tag(Tag::kTensor, m.type, 0, 2), m.buffer, m.offset,
                                 m.rows, m.columns, m.columns, 1});
  }

  // The activation of a linear layer, the node `index`, goes where the layer is.
  void join_relu(uint32_t index) {
    const auto found = linear_before(index, &Op::with_relu, /*alone=*/true);
    if (!found) return;
    Made& made = begin(found->product, found->product, graph_.nodes[found->product].op->with_relu);
    for (const int64_t* item : arguments(found->product)) put(item, &made.arguments);
    made.arguments.insert(made.arguments.end(), {graph::make_tag(Tag::kBool), 0});  // no GELU
    put(found->result, &made.results);
    made_[index].gone = true;
  }

  // Its GELU is saved for the backward, which reads what comes before; else there is nothing to
  // save.
  void join_gelu(uint32_t index) {
    if (!takes_gelu() || !is_tanh(arguments(index)[1])) return;
    const auto found = linear_before(index, &Op::with_gelu, /*alone=*/false);
    if (!found) return;
    Made& made = begin(found->product, found->product, graph_.nodes[found->product].op->with_gelu);
    const auto items = arguments(found->product);
    for (size_t i = 0; i < 3; ++i) put(items[i], &made.arguments);
    put(found->result, &made.results);
    const auto before = graph_.results(graph_.nodes[found->product]);
    made.results.insert(made.results.end(), before.begin(), before.end());
    made_[index].gone = true;
  }

  struct Layer {
    uint32_t product;
    DenseMatrix result;  // of the activation
  };
  // `joined`: the operator that does both.
  std::optional<Layer> linear_before(uint32_t index, const Op* Op::* joined, bool alone) const {
    const auto input = read_operand(arguments(index)[0]);
    const int64_t* result = graph_.results(graph_.nodes[index]).data();
    if (!input || !covers(graph_, result)) return std::nullopt;
    const uint32_t product = product_of(input->buffer, index, alone);
    if (product == kNobody || graph_.nodes[product].op->*joined == nullptr || !is_linear(product)) {
      return std::nullopt;
    }
    const TensorWords layer = graph::read_tensor(graph_.results(graph_.nodes[product]).data());
    const auto before = as_dense_matrix(arguments(index)[0], layer.sizes[1]);
    const auto after = as_dense_matrix(result, layer.sizes[1]);
    if (!before || !after || before->rows != layer.sizes[0] || before->type != layer.dtype ||
        after->type != layer.dtype) {
      return std::nullopt;
    }
    return Layer{product, *after};
  }

  // gelu_backward(mm(left, right), before).
  void join_gelu_backward(uint32_t index) {
    const auto items = arguments(index);
    const auto gradient = read_operand(items[0]);
    const int64_t* result = graph_.results(graph_.nodes[index]).data();
    if (!takes_gelu() || !is_tanh(items[2]) || !gradient || !covers(graph_, result)) return;
    const uint32_t product = product_of(gradient->buffer, index, /*alone=*/true);
    if (product == kNobody) return;
    const Node& node = graph_.nodes[product];
    if (node.op->with_gelu_backward == nullptr) return;
    const TensorWords made_there = graph::read_tensor(graph_.results(node).data());
    const auto layer = [&](const std::optional<DenseMatrix>& m) {  // like what the product makes
      return m && m->rows == made_there.sizes[0] && m->type == made_there.dtype;
    };
    const int64_t columns = made_there.sizes[1];
    const auto after = as_dense_matrix(result, columns);
    const auto before = as_dense_matrix(items[1], columns);
    if (!layer(after) || !layer(before) || !layer(as_dense_matrix(items[0], columns)) ||
        uses_.is_written(before->buffer, product, index)) {
      return;
    }
    // A product that waits for its sum may be made later than this one.
    const int64_t filled = uses_.last_write(before->buffer, product);
    if (filled >= 0 && made_[static_cast<size_t>(filled)].gone) return;
    Made& made = begin(product, product, node.op->with_gelu_backward);
    for (const int64_t* item : arguments(product)) put(item, &made.arguments);
    put(*before, &made.arguments);
    put(*after, &made.results);
    made_[index].gone = true;
  }

  // sum(gradient, 0), the gradient of a bias, and mm(gradient^T, input), that of the weight. The
  // earlier one goes where the later one is.
  void join_sum(uint32_t index) {
    const auto items = arguments(index);
    const auto gradient = read_operand(items[0]);
    const int64_t* result = graph_.results(graph_.nodes[index]).data();
    if (!gradient || gradient->sizes.size() != 2 || !is_dense(*gradient) ||
        !is_first_dimension(items[1]) || graph::tag_of(*items[2]) != Tag::kBool ||
        graph::tag_of(*items[3]) != Tag::kNone || !covers(graph_, result)) {
      return;
    }
    for (const StorageUses::Touch& touch : uses_.of(gradient->buffer)) {
      if (touch.node == index || !is_free(touch.node)) continue;
      if (!multiplies_transposed(touch.node, *gradient)) continue;
      const uint32_t first = std::min(touch.node, index);
      const uint32_t last = std::max(touch.node, index);
      if (!may_wait(first, last)) continue;
      Made& made = begin(last, touch.node, graph_.nodes[touch.node].op->with_sum);
      for (const int64_t* item : arguments(touch.node)) put(item, &made.arguments);
      put(items[2], &made.arguments);
      const auto product = graph_.results(graph_.nodes[touch.node]);
      made.results.assign(product.begin(), product.end());
      put(result, &made.results);
      made_[first].gone = true;
      return;
    }
  }

  // Whether the node is mm(gradient^T, something).
  bool multiplies_transposed(uint32_t index, const TensorWords& gradient) const {
    if (graph_.nodes[index].op->with_sum == nullptr) return false;
    const auto left = read_operand(arguments(index)[0]);
    const auto right = read_operand(arguments(index)[1]);
    return left && right && left->buffer == gradient.buffer && left->offset == gradient.offset &&
           left->dtype == gradient.dtype && left->sizes[0] == gradient.sizes[1] &&
           left->sizes[1] == gradient.sizes[0] && left->strides[0] == 1 &&
           left->strides[1] == gradient.sizes[1];
  }

  // Whether a node can do what it does as late as at another one.
  bool may_wait(uint32_t first, uint32_t last) const {
    for (const graph::Use& use : graph::uses(graph_, graph_.nodes[first])) {
      if (!use.fresh) {
        if (uses_.is_written(use.buffer, first + 1, last + 1)) return false;
        continue;
      }
      for (const StorageUses::Touch& touch : uses_.of(use.buffer)) {
        if (touch.node > first && touch.node <= last) return false;
      }
    }
    return true;
  }

  Made& begin(uint32_t at, uint32_t like, const Op* op) {
    made_[at].op = op;
    made_[at].like = like;
    return made_[at];
  }

  void append(const Made& made, const Node& at, Graph* out) const {
    Node node = graph_.nodes[made.like];  // its settings: those of products matter
    node.origin = at.origin;
    node.op = made.op;
    node.words = static_cast<uint32_t>(out->words.size());
    out->words.insert(out->words.end(), made.arguments.begin(), made.arguments.end());
    node.outputs = static_cast<uint32_t>(out->words.size());
    out->words.insert(out->words.end(), made.results.begin(), made.results.end());
    node.end = static_cast<uint32_t>(out->words.size());
    out->nodes.push_back(node);
  }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  std::vector<Made> made_;  // per node
};

}  // namespace

Graph join_epilogues(const Graph& graph, const std::vector<bool>& outputs) {
  return Epilogues(graph, outputs).run();
}

}  // namespace acc::passes
