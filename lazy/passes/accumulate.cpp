#include "lazy/passes/accumulate.h"

#include <algorithm>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/storage_uses.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::kNobody;
using graph::Node;
using graph::Tag;

// The product moves to the addition, and its operands are held until then. Between them stand
// at most the other products of one operator's backward.
constexpr uint32_t kMaxDistance = 8;

bool same_item(const int64_t* a, const int64_t* b) {
  const uint32_t words = graph::item_words(a);
  return graph::item_words(b) == words && std::equal(a, a + words, b);
}

class Accumulation {
 public:
  Accumulation(const Graph& graph, const std::vector<bool>& outputs)
      : graph_(graph), outputs_(outputs), uses_(graph) {}

  Graph run() {
    std::vector<uint32_t> product(graph_.nodes.size(), kNobody);  // per addition: its product
    std::vector<bool> gone(graph_.nodes.size(), false);
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      const uint32_t addition = addition_of(i);
      if (addition == kNobody || product[addition] != kNobody) continue;
      product[addition] = i;
      gone[i] = true;
    }
    Graph out;
    out.buffers = graph_.buffers;
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      if (gone[i]) continue;
      if (product[i] == kNobody) {
        out.append(graph_.nodes[i], graph_.words);
      } else {
        append_accumulating(graph_.nodes[product[i]], graph_.nodes[i], &out);
      }
    }
    return out;
  }

 private:
  // The call that adds this product to something and is its only user; kNobody if there is none
  // with which it can be joined.
  uint32_t addition_of(uint32_t index) const {
    const Node& product = graph_.nodes[index];
    if (product.op->plus == nullptr) return kNobody;
    const int64_t* result = graph_.results(product).data();
    const graph::TensorWords made = graph::read_tensor(result);
    if (made.dtype != graph::dtype::kF32 && made.dtype != graph::dtype::kF64) return kNobody;
    const graph::Buffer& buffer = graph_.buffers[made.buffer];
    const auto users = uses_.of(made.buffer);
    if (outputs_[made.buffer] || users.size() != 2 || users[0].node != index) return kNobody;
    const uint32_t addition = users[1].node;
    if (addition - index > kMaxDistance) return kNobody;
    const Node& node = graph_.nodes[addition];
    const bool in_place = node.op->name == "aten::add_.Tensor";
    if (!in_place && node.op->name != "aten::add.Tensor") return kNobody;
    // self + alpha * other: the product is `other`.
    const auto items = graph::items(graph_.arguments(node));
    if (!same_item(items[1], result)) return kNobody;
    // With another factor, 0 would leave the product out, and its infinities.
    if (*items[2] != graph::make_tag(Tag::kInt) || items[2][1] != 1) return kNobody;
    if (graph::tag_of(*items[0]) != Tag::kTensor) return kNobody;
    const graph::TensorWords sum = graph::read_tensor(items[0]);
    if (sum.dtype != made.dtype || (sum.flags | made.flags) != 0 ||
        !std::ranges::equal(sum.sizes, made.sizes)) {
      return kNobody;
    }
    const uint32_t sum_group = graph_.buffers[sum.buffer].group;
    if (sum_group == buffer.group) return kNobody;
    for (const graph::Use& use : graph::uses(graph_, product)) {
      if (use.fresh) continue;
      const uint32_t group = graph_.buffers[use.buffer].group;
      if (in_place && group == sum_group) return kNobody;
      if (uses_.is_written(use.buffer, index + 1, addition)) return kNobody;
    }
    return addition;
  }

  void append_accumulating(const Node& product, const Node& addition, Graph* out) const {
    const auto put = [out](const int64_t* item) {
      out->words.insert(out->words.end(), item, item + graph::item_words(item));
    };
    const auto items = graph::items(graph_.arguments(addition));
    Node node = product;  // its settings: those of products matter
    node.op = addition.op->writes ? product.op->plus_in_place : product.op->plus;
    node.words = static_cast<uint32_t>(out->words.size());
    put(items[0]);
    for (const int64_t* item : graph::items(graph_.arguments(product))) put(item);
    out->words.push_back(graph::make_tag(Tag::kInt));  // beta
    out->words.push_back(1);
    put(items[2]);  // alpha
    node.outputs = static_cast<uint32_t>(out->words.size());
    const auto results = graph_.results(addition);
    out->words.insert(out->words.end(), results.begin(), results.end());
    node.end = static_cast<uint32_t>(out->words.size());
    node.values = addition.values;
    node.n_values = addition.n_values;
    out->nodes.push_back(node);
  }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const StorageUses uses_;
};

}  // namespace

Graph accumulate_products(const Graph& graph, const std::vector<bool>& outputs) {
  return Accumulation(graph, outputs).run();
}

}  // namespace acc::passes
