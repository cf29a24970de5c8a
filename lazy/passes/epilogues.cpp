#include "lazy/passes/epilogues.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/env.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/formula.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;
using graph::TensorWords;

// cublasLt reads what a backward needs in rows of so many elements, of bits for ReLU.
constexpr int64_t kAuxElements = 8;
constexpr int64_t kAuxBits = 128;

enum class Activation : unsigned char { kRelu, kGelu };

struct Shape {
  uint8_t dtype = 0;
  int64_t rows = 0;
  int64_t columns = 0;

  bool operator==(const Shape&) const = default;
};

bool is_one(const int64_t* word) {
  return graph::tag_of(*word) == Tag::kInt && graph::flags_of(*word) == 0 && word[1] == 1;
}

bool is_zero(const int64_t* word) {
  const Tag tag = graph::tag_of(*word);
  return (tag == Tag::kInt || tag == Tag::kFloat) && graph::flags_of(*word) == 0 && word[1] == 0;
}

bool is_text(const int64_t* word, std::string_view text) {
  return graph::tag_of(*word) == Tag::kString &&
         text == std::string_view(reinterpret_cast<const char*>(word + 1), graph::count_of(*word));
}

bool is_plain(const int64_t* word, uint8_t dtype) {
  return graph::tag_of(*word) == Tag::kTensor && graph::flags_of(*word) == 0 &&
         graph::dtype_of(*word) == dtype;
}

// Whether the elements lie one behind the other, in their order.
bool is_contiguous(const TensorWords& t) {
  int64_t stride = 1;
  for (size_t i = t.sizes.size(); i-- > 0;) {
    if (t.sizes[i] != 1 && t.strides[i] != stride) return false;
    stride *= t.sizes[i];
  }
  return true;
}

int64_t elements_of(const TensorWords& t) {
  int64_t elements = 1;
  for (const int64_t size : t.sizes) elements *= size;
  return elements;
}

// A matrix that cublasLt takes as it lies: of rows or of columns that do not overlap.
bool is_operand(const int64_t* word, uint8_t dtype) {
  if (!is_plain(word, dtype)) return false;
  const TensorWords t = graph::read_tensor(word);
  if (t.sizes.size() != 2) return false;
  return (t.strides[1] == 1 && t.strides[0] >= t.sizes[1]) ||
         (t.strides[0] == 1 && t.strides[1] >= t.sizes[0]);
}

class Joining {
 public:
  Joining(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph),
        outputs_(outputs),
        uses_(graph),
        calls_(graph.nodes.size()),
        gone_(graph.nodes.size(), false) {}

  Graph run() {
    made_.buffers = graph_.buffers;
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) join_activation(i);
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) join_backward(i);
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) join_bias_gradient(i);
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      if (gone_[i]) continue;
      if (calls_[i].has_value()) {
        if (calls_[i]->op == graph_.nodes[i].op->epilogues.activation) end_activation(&*calls_[i]);
        append(graph_.nodes[i], *calls_[i]);
      } else {
        made_.append(graph_.nodes[i], graph_.words);
      }
    }
    return std::move(made_);
  }

 private:
  // What stands in a node's place: items of its arguments, items of its results.
  struct Call {
    const graph::Op* op = nullptr;
    uint32_t product = 0;  // the node whose settings are its own
    std::vector<int64_t> arguments;
    std::vector<int64_t> results;
  };
  // A product and the ReLU that has joined it.
  struct Activated {
    uint32_t product = 0;
    uint32_t activation = 0;
    Shape shape;
  };

  // ---- forward

  void join_activation(uint32_t index) {
    const Node& node = graph_.nodes[index];
    if (node.op->epilogues.activation == nullptr) return;
    const auto items = graph::items(graph_.arguments(node));
    if (items.size() != 5 || !is_one(items[3]) || !is_one(items[4])) return;
    const auto shape = product_of(node, items[1], items[2]);
    if (!shape.has_value() || !is_plain(items[0], shape->dtype)) return;
    const TensorWords bias = graph::read_tensor(items[0]);
    if (bias.sizes.size() != 1 || bias.sizes[0] != shape->columns || bias.strides[0] != 1) return;

    const int64_t* made = graph_.results(node).data();
    const uint32_t buffer = graph::read_tensor(made).buffer;
    const auto users = uses_.of(buffer);
    if (users.front().node != index) return;
    const auto found = std::ranges::find_if(
        users, [&](const auto& user) { return activation_at(user.node).has_value(); });
    if (found == users.end()) return;
    const uint32_t activation = found->node;
    const Activation kind = *activation_at(activation);
    const Node& next = graph_.nodes[activation];
    const bool in_place = next.op->writes;
    if (!is_all_of(graph::items(graph_.arguments(next))[0], made, *shape)) return;
    if (uses_.is_written(buffer, index + 1, activation)) return;
    const int64_t* activated = in_place ? made : graph_.results(next).data();
    if (!in_place && !covers_in_order(activated, *shape)) return;
    if (is_read_by_kernel(graph::read_tensor(activated).buffer, activation)) return;
    const bool is_seen = outputs_[buffer] || users.size() > 2;  // by others
    const bool is_first = found - users.begin() == 1;

    Call call{node.op->epilogues.activation, index, {}, {}};
    for (size_t i = 0; i < 3; ++i) put_item(items[i], &call.arguments);
    put_bool(kind == Activation::kGelu, &call.arguments);
    put_matrix(graph::read_tensor(activated).buffer, *shape, &call.results);
    if (kind == Activation::kRelu) {
      if (!is_first || (!in_place && is_seen)) return;
      activated_[graph::read_tensor(activated).buffer] = {index, activation, *shape};
    } else if (is_seen) {
      if (shape->columns % kAuxElements != 0) return;
      put_aux(matrix(buffer, 0, shape->dtype, shape->rows, shape->columns), &call);
    }
    calls_[index] = std::move(call);
    gone_[activation] = true;
  }

  // A second result, for the backward. Without there is none.
  static void put_aux(std::span<const int64_t> aux, Call* call) { put(aux, &call->results); }
  static bool has_aux(const Call& call) { return graph::items(call.results).size() > 1; }
  // Says in the arguments whether there is one.
  static void end_activation(Call* call) {
    put_bool(has_aux(*call), &call->arguments);
    if (!has_aux(*call)) call->results.push_back(graph::make_tag(Tag::kUndefined));
  }

  std::optional<Activation> activation_at(uint32_t index) const {
    const Node& node = graph_.nodes[index];
    const std::string_view name = node.op->name;
    if (name == "aten::relu" || name == "aten::relu_") return Activation::kRelu;
    if (name == "aten::gelu" && is_text(graph::items(graph_.arguments(node))[1], "tanh")) {
      return Activation::kGelu;
    }
    return std::nullopt;
  }

  // Whether the next to read a tensor after `node` is a generated kernel: with the activation in
  // it, it would not read more.
  bool is_read_by_kernel(uint32_t buffer, uint32_t node) const {
    for (const auto& use : uses_.of(buffer)) {
      if (use.node > node) {
        return graph::formula_of(graph_, graph_.nodes[use.node]) != nullptr;
      }
    }
    return false;
  }

  // ---- backward

  void join_backward(uint32_t index) {
    const Node& node = graph_.nodes[index];
    if (node.op->epilogues.activation_backward == nullptr) return;
    const auto items = graph::items(graph_.arguments(node));
    if (items.size() != 2) return;
    const auto shape = product_of(node, items[0], items[1]);
    if (!shape.has_value()) return;
    const int64_t* made = graph_.results(node).data();
    const uint32_t buffer = graph::read_tensor(made).buffer;
    const auto users = uses_.of(buffer);
    if (outputs_[buffer] || users.size() != 2 || users.front().node != index) return;

    const uint32_t backward = users[1].node;
    const Node& next = graph_.nodes[backward];
    const auto arguments = graph::items(graph_.arguments(next));
    const bool gelu = next.op->name == "aten::gelu_backward" && is_text(arguments[2], "tanh");
    const bool relu = next.op->name == "aten::threshold_backward" && is_zero(arguments[2]);
    if ((!gelu && !relu) || !is_all_of(arguments[0], made, *shape)) return;
    const int64_t* gradient = graph_.results(next).data();
    if (!covers_in_order(gradient, *shape)) return;
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (!use.fresh && uses_.is_written(use.buffer, index + 1, backward)) return;
    }
    const std::optional<std::vector<int64_t>> aux =
        gelu ? gelu_aux(arguments[1], *shape) : relu_aux(arguments[1], *shape, backward);
    if (!aux.has_value()) return;

    Call call{node.op->epilogues.activation_backward, index, {}, {}};
    put(graph_.arguments(node), &call.arguments);
    put(*aux, &call.arguments);
    const uint32_t sum = sum_of_rows(gradient, *shape, backward);
    put_bool(gelu, &call.arguments);
    put_bool(sum != kNobody, &call.arguments);
    put_matrix(graph::read_tensor(gradient).buffer, *shape, &call.results);
    put_sum(sum, shape->columns, &call.results);
    calls_[backward] = std::move(call);
    gone_[index] = true;
  }

  // The input of GELU, as it is.
  std::optional<std::vector<int64_t>> gelu_aux(const int64_t* word, const Shape& shape) const {
    if (shape.columns % kAuxElements != 0 || !is_plain(word, shape.dtype)) return std::nullopt;
    const TensorWords t = graph::read_tensor(word);
    if (!is_contiguous(t) || elements_of(t) != shape.rows * shape.columns) return std::nullopt;
    return matrix(t.buffer, t.offset, shape.dtype, shape.rows, shape.columns);
  }

  // A bit per element of what ReLU made, which the product before it leaves.
  std::optional<std::vector<int64_t>> relu_aux(const int64_t* word, const Shape& shape,
                                               uint32_t backward) {
    if (shape.columns % kAuxBits != 0 || !is_plain(word, shape.dtype)) return std::nullopt;
    const uint32_t buffer = graph::read_tensor(word).buffer;
    const auto found = activated_.find(buffer);
    if (found == activated_.end()) return std::nullopt;
    const Activated& forward = found->second;
    Call& call = *calls_[forward.product];
    if (forward.shape != shape || !is_all_of(word, call.results.data(), shape) ||
        uses_.is_written(buffer, forward.activation + 1, backward)) {
      return std::nullopt;
    }
    if (!has_aux(call)) {
      const auto bits = static_cast<uint32_t>(made_.buffers.size());
      const int64_t bytes = shape.columns / 8;
      made_.buffers.push_back(
          {graph::BufferKind::kFresh, static_cast<uint64_t>(shape.rows * bytes), bits, 0, true});
      put_aux(matrix(bits, 0, graph::dtype::kU8, shape.rows, bytes), &call);
    }
    const int64_t* aux = graph::items(call.results)[1];
    return std::vector<int64_t>(aux, aux + graph::item_words(aux));
  }

  // ---- gradients of biases

  void join_bias_gradient(uint32_t index) {
    const Node& node = graph_.nodes[index];
    if (node.op->epilogues.bias_gradient == nullptr || gone_[index] || calls_[index]) return;
    const auto items = graph::items(graph_.arguments(node));
    if (items.size() != 2) return;
    const auto shape = product_of(node, items[0], items[1]);
    if (!shape.has_value()) return;
    for (const bool left : {true, false}) {
      const TensorWords operand = graph::read_tensor(items[left ? 0 : 1]);
      // Rows of the gradient are what the product sums up.
      const size_t summed = left ? 1 : 0;
      const Shape gradient{shape->dtype, operand.sizes[summed], operand.sizes[1 - summed]};
      if (operand.strides[1 - summed] != 1 || operand.strides[summed] != gradient.columns) continue;
      const int64_t writer = uses_.last_write(operand.buffer, index);
      if (writer < 0) continue;
      const Node& from = graph_.nodes[static_cast<size_t>(writer)];
      if (graph::formula_of(graph_, from) != nullptr) continue;
      const auto word =
          matrix(operand.buffer, operand.offset, gradient.dtype, gradient.rows, gradient.columns);
      const uint32_t sum = sum_of_rows(word.data(), gradient, static_cast<uint32_t>(writer));
      if (sum == kNobody) continue;
      Call call{node.op->epilogues.bias_gradient, index, {}, {}};
      put(graph_.arguments(node), &call.arguments);
      put_bool(left, &call.arguments);
      put(graph_.results(node), &call.results);
      put_sum(sum, gradient.columns, &call.results);
      // Where the sum is used before the product is made, it stays.
      const uint32_t made = graph::read_tensor(graph_.results(graph_.nodes[sum]).data()).buffer;
      const auto users = uses_.of(made);
      if (sum < index && users.size() > 1 && users[1].node < index) {
        gone_[sum] = false;
        continue;
      }
      calls_[index] = std::move(call);
      return;
    }
  }

  // ---- what they share

  static constexpr uint32_t kNobody = UINT32_MAX;

  // Of a product whose result is a matrix of new memory, and whose operands cublasLt takes.
  std::optional<Shape> product_of(const Node& node, const int64_t* left,
                                  const int64_t* right) const {
    if (node.n_values != 0) return std::nullopt;
    const int64_t* made = graph_.results(node).data();
    if (graph::tag_of(*made) != Tag::kTensor) return std::nullopt;
    const TensorWords t = graph::read_tensor(made);
    if (t.sizes.size() != 2) return std::nullopt;
    const Shape shape{t.dtype, t.sizes[0], t.sizes[1]};
    const bool half = graph::dtype::is_half(shape.dtype);
    // An epilogue works on what is not rounded yet.
    if (half ? base::env::exact() : shape.dtype != graph::dtype::kF32) return std::nullopt;
    if (!is_operand(left, shape.dtype) || !is_operand(right, shape.dtype)) return std::nullopt;
    if (graph::read_tensor(left).sizes[1] == 0 || !covers_in_order(made, shape)) {
      return std::nullopt;
    }
    return shape;
  }

  // Whether the tensor at `word` is all of a new buffer, in order, with so many elements.
  bool covers_in_order(const int64_t* word, const Shape& shape) const {
    if (!is_plain(word, shape.dtype) || !covers(graph_, word)) return false;
    const TensorWords t = graph::read_tensor(word);
    const graph::Buffer& buffer = graph_.buffers[t.buffer];
    return buffer.kind == graph::BufferKind::kFresh && buffer.group == t.buffer &&
           is_contiguous(t) && elements_of(t) == shape.rows * shape.columns;
  }

  // Whether the tensor at `word` has the elements of the one at `made`, in the same order.
  static bool is_all_of(const int64_t* word, const int64_t* made, const Shape& shape) {
    if (!is_plain(word, shape.dtype)) return false;
    const TensorWords t = graph::read_tensor(word);
    const TensorWords whole = graph::read_tensor(made);
    return t.buffer == whole.buffer && t.offset == whole.offset && is_contiguous(t) &&
           elements_of(t) == shape.rows * shape.columns;
  }

  // The call that sums up the rows of the matrix at `word`, which `writer` makes; it is taken out.
  uint32_t sum_of_rows(const int64_t* word, const Shape& shape, uint32_t writer) {
    const uint32_t buffer = graph::read_tensor(word).buffer;
    for (const auto& use : uses_.of(buffer)) {
      if (use.node <= writer || gone_[use.node]) continue;
      if (use.writes) return kNobody;
      const Node& node = graph_.nodes[use.node];
      if (node.op->name != "aten::sum.dim_IntList" || node.n_values != 0) continue;
      const auto items = graph::items(graph_.arguments(node));
      const int64_t* made = graph_.results(node).data();
      if (!is_all_of(items[0], word, shape) || graph::tag_of(*items[3]) != Tag::kNone) continue;
      if (!sums_all_but_last(items[0], items[1]) ||
          graph::read_tensor(items[0]).sizes.back() != shape.columns) {
        continue;
      }
      if (!covers_in_order(made, {shape.dtype, 1, shape.columns})) continue;
      gone_[use.node] = true;
      return use.node;
    }
    return kNobody;
  }

  static bool sums_all_but_last(const int64_t* tensor, const int64_t* dims) {
    const auto rank = static_cast<int64_t>(graph::count_of(*tensor));
    if (graph::tag_of(*dims) != Tag::kList || rank < 2) return false;
    std::vector<bool> summed(static_cast<size_t>(rank), false);
    for (const int64_t* item : graph::items({dims + 1, graph::item_words(dims) - 1})) {
      if (graph::tag_of(*item) != Tag::kInt || graph::flags_of(*item) != 0) return false;
      const int64_t dim = item[1] < 0 ? item[1] + rank : item[1];
      summed[static_cast<size_t>(dim)] = true;
    }
    return !summed.back() && std::ranges::count(summed, true) == rank - 1;
  }

  static void put_item(const int64_t* item, std::vector<int64_t>* words) {
    words->insert(words->end(), item, item + graph::item_words(item));
  }
  static void put(std::span<const int64_t> items, std::vector<int64_t>* words) {
    words->insert(words->end(), items.begin(), items.end());
  }
  static void put_bool(bool value, std::vector<int64_t>* words) {
    words->insert(words->end(), {graph::make_tag(Tag::kBool), value ? 1 : 0});
  }
  static std::vector<int64_t> matrix(uint32_t buffer, int64_t offset, uint8_t dtype, int64_t rows,
                                     int64_t columns) {
    return {graph::make_tag(Tag::kTensor, dtype, 0, 2), buffer, offset, rows, columns, columns, 1};
  }
  static void put_matrix(uint32_t buffer, const Shape& shape, std::vector<int64_t>* words) {
    put(matrix(buffer, 0, shape.dtype, shape.rows, shape.columns), words);
  }
  void put_sum(uint32_t node, int64_t columns, std::vector<int64_t>* words) const {
    if (node == kNobody) {
      words->push_back(graph::make_tag(Tag::kUndefined));
      return;
    }
    const TensorWords made = graph::read_tensor(graph_.results(graph_.nodes[node]).data());
    words->insert(words->end(),
                  {graph::make_tag(Tag::kTensor, made.dtype, 0, 1), made.buffer, 0, columns, 1});
  }

  void append(const Node& place, const Call& call) {
    Graph one;
    one.words = call.arguments;
    Node node = graph_.nodes[call.product];
    node.source = place.source;
    node.origin = place.origin;
    node.op = call.op;
    node.n_values = 0;
    node.words = 0;
    node.outputs = static_cast<uint32_t>(one.words.size());
    put(call.results, &one.words);
    node.end = static_cast<uint32_t>(one.words.size());
    made_.append(node, one.words);
  }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
  std::vector<std::optional<Call>> calls_;
  std::vector<bool> gone_;
  std::map<uint32_t, Activated> activated_;  // by what a ReLU made
  Graph made_;
};

}  // namespace

Graph join_epilogues(const Graph& graph, const std::vector<bool>& outputs) {
  return Joining(graph, outputs).run();
}

}  // namespace acc::passes
