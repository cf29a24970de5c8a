#include "lazy/passes/elementwise.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "csrc/base/env.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"

namespace acc::passes {
namespace {

using graph::Fn;
using graph::Tag;
namespace dtype = graph::dtype;

// Types in which kernels compute and of which they store results.
bool is_result(uint8_t type) {
  return dtype::is_floating(type) || type == dtype::kI32 || type == dtype::kI64 ||
         type == dtype::kBool;
}

bool is_whole(double number) { return number == std::trunc(number) && std::abs(number) < 1e15; }

class Analysis {
 public:
  Analysis(const graph::Graph& graph, const graph::Node& node) : graph_(graph), node_(node) {}

  std::optional<Elementwise> run() {
    made_.formula = graph::formula_of(graph_, node_);
    if (made_.formula == nullptr || !read_items() || !find_result()) return std::nullopt;
    if (!add_operands() || !find_type() || !check_terms()) return std::nullopt;
    return std::move(made_);
  }

 private:
  const graph::Op& op() const { return *node_.op; }

  bool read_items() {
    uint32_t value = node_.values;
    made_.items = graph::items(graph_.arguments(node_));
    for (const int64_t* item : made_.items) {
      made_.values.push_back(value);
      value += graph::item_values(item);
    }
    made_.operands.assign(op().arguments.size(), -1);
    return made_.items.size() == op().arguments.size() &&
           std::ranges::none_of(op().arguments, &graph::Argument::out);
  }

  bool find_result() {
    if (op().returns.size() != 1 || op().returns[0].list) return false;
    const int alias = op().returns[0].alias;
    const int64_t* word =
        alias < 0 ? graph_.results(node_).data() : made_.items[static_cast<size_t>(alias)];
    if (graph::tag_of(*word) != Tag::kTensor) return false;
    result_ = graph::read_tensor(word);
    in_place_ = alias >= 0;
    return is_plain(result_) && is_result(result_.dtype) &&
           std::ranges::find(result_.sizes, 0) == result_.sizes.end();
  }

  static bool is_plain(const graph::TensorWords& tensor) {
    return dtype::is_known(tensor.dtype) &&
           (tensor.flags & (graph::kConjFlag | graph::kNegFlag)) == 0;
  }

  bool add_operands() {
    Nest& nest = made_.nest;
    nest.sizes.assign(result_.sizes.begin(), result_.sizes.end());
    for (const graph::Term& term : made_.formula->terms) {
      if (term.fn != Fn::kArgument || term.argument >= made_.items.size()) continue;
      if (made_.operands[term.argument] >= 0) continue;
      const int64_t* word = made_.items[term.argument];
      if (graph::tag_of(*word) != Tag::kTensor) continue;
      const graph::TensorWords tensor = graph::read_tensor(word);
      const auto access = broadcast(tensor, result_.sizes);
      if (!is_plain(tensor) || !access.has_value()) return false;
      made_.operands[term.argument] = static_cast<int32_t>(nest.accesses.size());
      nest.accesses.push_back(*access);
    }
    nest.accesses.push_back(*broadcast(result_, result_.sizes));
    return is_injective(nest.accesses.back(), nest.sizes);
  }

  // PyTorch's promotion, as far as it can be told from the result. What cannot be told is refused.
  bool find_type() {
    if (made_.formula->converts) return find_cast();
    const uint8_t type = made_.formula->truth() ? common_type() : result_.dtype;
    if (!is_result(type) || (made_.formula->truth() && result_.dtype != dtype::kBool)) return false;
    made_.computed = dtype::computed_in(type);
    if (base::env::exact() && dtype::is_half(result_.dtype)) made_.rounded = result_.dtype;
    for (const graph::Term& term : made_.formula->terms) {
      if (term.fn != Fn::kArgument || term.argument >= made_.items.size()) continue;
      if (!fits(term, type)) return false;
    }
    return true;
  }

  bool find_cast() {
    made_.computed = dtype::computed_in(result_.dtype);
    const auto from = made_.nest.accesses.front().dtype;
    if (dtype::is_half(result_.dtype) && from != result_.dtype) made_.rounded = result_.dtype;
    return made_.nest.accesses.size() == 2;
  }

  // In which type tensors are compared; 0xff if that is not simply the type of all of them.
  uint8_t common_type() const {
    uint8_t type = 0xff;
    for (size_t i = 0; i < made_.operands.size(); ++i) {
      if (made_.operands[i] < 0) continue;
      const uint8_t own = graph::dtype_of(*made_.items[i]);
      if (type != 0xff && type != own) return 0xff;
      type = own;
    }
    return type;
  }

  bool fits(const graph::Term& term, uint8_t type) const {
    const int64_t* word = made_.items[term.argument];
    const Tag tag = graph::tag_of(*word);
    if (tag == Tag::kTensor) {
      const uint8_t own = graph::dtype_of(*word);
      if (term.truth) return own == dtype::kBool;
      // ATen's kernels round an operand of another type to the half type first, or not: each has
      // its own way.
      if (made_.rounded != 0 && own != result_.dtype && own != dtype::kBool) return false;
      // An in-place call computes in the common type and then converts; a float64 operand of one or
      // more dimensions would make that float64.
      const bool wider = own == dtype::kF64 && type != dtype::kF64 && graph::count_of(*word) > 0;
      if (in_place_ && wider) return false;
      return dtype::is_floating(type) || !dtype::is_floating(own);
    }
    if (term.truth) return false;
    // A comparison rounds the number to the half type first.
    if (made_.formula->truth() && dtype::is_half(type)) return false;
    const bool number = tag == Tag::kNumber;
    if (tag == Tag::kInt || tag == Tag::kBool) return true;
    if (number && !dtype::is_known(graph::dtype_of(*word))) return false;
    if (tag == Tag::kFloat || (number && dtype::is_floating(graph::dtype_of(*word)))) {
      // Sums round the number to the half type first, products do not.
      const bool sum = std::ranges::find(made_.formula->terms, Fn::kFma, &graph::Term::fn) !=
                       made_.formula->terms.end();
      if (made_.rounded != 0 && sum) return false;
      return dtype::is_floating(type);
    }
    return number;
  }

  // Whether kernels have each operation for the type.
  bool check_terms() const {
    const uint8_t type = made_.computed;
    for (const graph::Term& term : made_.formula->terms) {
      switch (term.fn) {
        case Fn::kArgument:
        case Fn::kSelect:
          break;
        case Fn::kConstant:
          if (!dtype::is_floating(type) && !is_whole(term.constant)) return false;
          break;
        case Fn::kEq:
        case Fn::kNe:
          break;
        case Fn::kLt:
        case Fn::kLe:
        case Fn::kGt:
        case Fn::kGe:
          // True is -1 in kernels.
          if (type == dtype::kBool) return false;
          break;
        case Fn::kAnd:
        case Fn::kOr:
        case Fn::kXor:
        case Fn::kNot:
          if (!term.truth && dtype::is_floating(type)) return false;
          break;
        case Fn::kAdd:
        case Fn::kSub:
        case Fn::kMul:
        case Fn::kFma:
        case Fn::kNeg:
        case Fn::kAbs:
        case Fn::kMin:
        case Fn::kMax:
          if (type == dtype::kBool) return false;
          break;
        case Fn::kDiv:
        case Fn::kSqrt:
        case Fn::kReciprocal:
        case Fn::kRsqrt:
          if (!dtype::is_floating(type)) return false;
          break;
        default:
          if (type != dtype::kF32) return false;
      }
    }
    return true;
  }

  const graph::Graph& graph_;
  const graph::Node& node_;
  graph::TensorWords result_{};
  bool in_place_ = false;
  Elementwise made_;
};

}  // namespace

std::optional<Elementwise> as_elementwise(const graph::Graph& graph, const graph::Node& node) {
  return Analysis(graph, node).run();
}

}  // namespace acc::passes
