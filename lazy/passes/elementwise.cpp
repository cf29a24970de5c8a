#include "lazy/passes/elementwise.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "csrc/base/env.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/axes.h"

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
    if (made_.formula == nullptr || !read_items() || !find_loops()) return std::nullopt;
    if (!add_operands() || !add_results() || !find_type() || !check_terms()) return std::nullopt;
    return std::move(made_);
  }

 private:
  const graph::Op& op() const { return *node_.op; }

  bool has_term(Fn fn) const {
    return std::ranges::find(made_.formula->terms, fn, &graph::Term::fn) !=
           made_.formula->terms.end();
  }

  bool read_items() {
    uint32_t value = node_.values;
    made_.items = graph::items(graph_.arguments(node_));
    for (const int64_t* item : made_.items) {
      made_.values.push_back(value);
      value += graph::item_values(item);
    }
    made_.operands.assign(op().arguments.size(), -1);
    return made_.items.size() == op().arguments.size();
  }

  // An undefined tensor, or one without elements: batch norm has such results outside of training.
  static bool is_nothing(const int64_t* word) {
    if (graph::tag_of(*word) != Tag::kTensor) return graph::tag_of(*word) == Tag::kUndefined;
    return product(graph::read_tensor(word).sizes) == 0;
  }

  // The results' words, fresh or in place, without those of nothing; nothing where they are not as
  // many as the formula's.
  std::vector<const int64_t*> results() const {
    const std::vector<const int64_t*> fresh = graph::items(graph_.results(node_));
    std::vector<const int64_t*> found;
    size_t next = 0;
    for (const graph::Return& value : op().returns) {
      if (value.list) return {};
      if (value.alias >= 0) {
        found.push_back(made_.items[static_cast<size_t>(value.alias)]);
      } else if (next < fresh.size()) {
        found.push_back(fresh[next++]);
      }
    }
    std::erase_if(found, is_nothing);
    if (found.size() != made_.formula->results.size()) found.clear();
    return found;
  }

  bool find_loops() {
    const auto found = results();
    if (found.empty() || graph::tag_of(*found[0]) != Tag::kTensor) return false;
    result_ = graph::read_tensor(found[0]);
    in_place_ = op().returns[0].alias >= 0;
    given_ = in_place_ && op().arguments[static_cast<size_t>(op().returns[0].alias)].out;
    // Where they differ in more than `out`, reductions have other arguments in this form.
    if (given_ && !made_.formula->over.empty()) return false;
    graph::TensorWords whole = result_;
    if (!made_.formula->over.empty()) {
      const auto first = std::ranges::find(
          made_.items, Tag::kTensor, [](const int64_t* item) { return graph::tag_of(*item); });
      if (first == made_.items.end()) return false;
      whole = graph::read_tensor(*first);
    }
    axes_ = Axes::find(*made_.formula, op(), made_.items, whole);
    if (!axes_.has_value()) return false;
    Nest& nest = made_.nest;
    nest.sizes = axes_->sizes();
    nest.reduced = axes_->reduced();
    if (!made_.formula->over.empty() && product(nest.sizes) == nest.kept_elements()) return false;
    return std::ranges::find(nest.sizes, 0) == nest.sizes.end();
  }

  static bool is_plain(const graph::TensorWords& tensor) {
    return dtype::is_known(tensor.dtype) &&
           (tensor.flags & (graph::kConjFlag | graph::kNegFlag)) == 0;
  }

  bool add_operands() {
    Nest& nest = made_.nest;
    for (const graph::Term& term : made_.formula->terms) {
      if (term.fn != Fn::kArgument) continue;
      if (made_.operands[term.argument] >= 0) continue;
      const int64_t* word = made_.items[term.argument];
      if (graph::tag_of(*word) != Tag::kTensor) continue;
      const graph::TensorWords tensor = graph::read_tensor(word);
      const auto access = axes_->operand(tensor);
      if (!is_plain(tensor) || !access.has_value()) return false;
      made_.operands[term.argument] = static_cast<int32_t>(nest.accesses.size());
      nest.accesses.push_back(*access);
    }
    if (std::ranges::any_of(made_.formula->terms,
                            [](const graph::Term& term) { return graph::is_draw(term.fn); })) {
      made_.index = static_cast<int32_t>(nest.accesses.size());
      nest.accesses.push_back(axes_->index());
    }
    if (!has_term(Fn::kPosition)) return true;
    const auto position = axes_->position();
    if (!position.has_value()) return false;
    made_.position = static_cast<int32_t>(nest.accesses.size());
    nest.accesses.push_back(*position);
    return true;
  }

  bool add_results() {
    const auto found = results();
    for (size_t i = 0; i < found.size(); ++i) {
      if (!add_result(found[i], made_.formula->results[i])) return false;
    }
    for (const graph::Formula::Write& write : made_.formula->writes) {
      if (!add_result(made_.items[write.argument], write.term)) return false;
    }
    return true;
  }

  bool add_result(const int64_t* word, uint32_t term) {
    if (graph::tag_of(*word) != Tag::kTensor) return false;
    Nest& nest = made_.nest;
    const graph::TensorWords tensor = graph::read_tensor(word);
    if (!is_plain(tensor) || !is_result(tensor.dtype)) return false;
    const auto access = axes_->result(tensor);
    if (!access.has_value()) return false;
    made_.results.push_back({static_cast<uint32_t>(nest.accesses.size()), term});
    nest.accesses.push_back(*access);
    return true;
  }

  // PyTorch's promotion, as far as it can be told from the result. What cannot be told is refused.
  bool find_type() {
    if (made_.formula->converts) return find_cast();
    const uint8_t type = made_.formula->truth() ? common_type() : result_.dtype;
    if (!is_result(type) || (made_.formula->truth() && result_.dtype != dtype::kBool)) return false;
    made_.computed = dtype::computed_in(type);
    if (base::env::exact() && dtype::is_half(result_.dtype)) made_.rounded = result_.dtype;
    // A power rounds base and exponent to the half type first.
    if (has_term(Fn::kPow) && dtype::is_half(type)) return false;
    // The square root of -inf is NaN and that of -0 is -0; ATen's power of float16 gives inf and 0.
    const bool root = has_term(Fn::kSqrt) || has_term(Fn::kRsqrt);
    if (root && type == dtype::kF16 && op().name.starts_with("aten::pow")) return false;
    for (const graph::Term& term : made_.formula->terms) {
      if (term.fn != Fn::kArgument) continue;
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

  // Where no tensor has dimensions, one on the CPU counts as much as they do.
  bool weighs(const int64_t* word) const {
    return graph::tag_of(*word) == Tag::kTensor
               ? graph::count_of(*word) > 0 || result_.sizes.empty()
               : graph::tag_of(*word) == Tag::kNumber && result_.sizes.empty() &&
                     (graph::flags_of(*word) & graph::kWrappedFlag) == 0;
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
    const bool beside = std::ranges::any_of(made_.items, [&](const int64_t* word) {
      return graph::tag_of(*word) == Tag::kNumber && weighs(word) && graph::dtype_of(*word) != type;
    });
    return beside ? 0xff : type;
  }

  // An in-place call computes in the common type, which this makes float64, and then converts.
  bool widens(const int64_t* word, uint8_t type) const {
    return graph::dtype_of(*word) == dtype::kF64 && type != dtype::kF64 && weighs(word);
  }

  // Whether the result's type has every number of another's.
  bool holds(uint8_t own) const {
    const uint8_t type = result_.dtype;
    if (own == type || own == dtype::kBool || type == dtype::kF64) return true;
    if (type == dtype::kF16) return own == dtype::kU8 || own == dtype::kI8;
    if (dtype::is_floating(type)) return own != dtype::kF64 && own != dtype::kF32;
    return type == dtype::kI64 && dtype::is_integer(own);
  }

  bool fits(const graph::Term& term, uint8_t type) const {
    const int64_t* word = made_.items[term.argument];
    const Tag tag = graph::tag_of(*word);
    // ATen is to refuse what it cannot convert. Tensors it reads as numbers here only.
    const bool checked = op().arguments[term.argument].checked;
    const bool read =
        op().name.starts_with("aten::masked_fill") && (tag == Tag::kTensor || tag == Tag::kNumber);
    if (checked && read && !holds(graph::dtype_of(*word))) return false;
    if (tag == Tag::kTensor) {
      const uint8_t own = graph::dtype_of(*word);
      if (term.truth) return own == dtype::kBool;
      // What is computed before it goes to `out` has a type of its own.
      if (given_ && own != type) return false;
      // ATen's kernels round an operand of another type to the half type first, or not: each has
      // its own way.
      if (made_.rounded != 0 && own != result_.dtype && own != dtype::kBool) return false;
      if (in_place_ && widens(word, type)) return false;
      return dtype::is_floating(type) || !dtype::is_floating(own);
    }
    if (term.truth) return false;
    // A comparison rounds the number to the half type first.
    if (made_.formula->truth() && dtype::is_half(type)) return false;
    const bool number = tag == Tag::kNumber;
    if (number && in_place_ && widens(word, type)) return false;
    const bool slot = (graph::flags_of(*word) & graph::kValueFlag) != 0;
    const bool one = !slot && tag == Tag::kInt && word[1] == 1;  // a factor that nobody gave
    if (checked && !slot && !number && !one) return false;
    // Truths are compared with a number as integers.
    const bool integer = tag == Tag::kInt || (number && graph::dtype_of(*word) != dtype::kBool);
    if (made_.formula->truth() && type == dtype::kBool && integer) return false;
    if (tag == Tag::kBool) return true;
    if (tag == Tag::kInt) {
      // Beside integers, whose type may not hold it.
      const bool varies = op().arguments[term.argument].role == graph::Role::kValue;
      if (!slot && varies && !std::in_range<int32_t>(word[1])) return false;
      // One that is no argument of kernels becomes a constant, and these are doubles.
      constexpr int64_t kExact = int64_t{1} << 53;
      return slot || (word[1] >= -kExact && word[1] <= kExact);
    }
    if (number && !dtype::is_known(graph::dtype_of(*word))) return false;
    if (tag == Tag::kFloat || (number && dtype::is_floating(graph::dtype_of(*word)))) {
      // Sums round the number to the half type first, products do not.
      if (made_.rounded != 0 && has_term(Fn::kFma)) return false;
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
        case Fn::kCount:
        case Fn::kPosition:
        case Fn::kSelect:
        case Fn::kDrawn:
          break;
        case Fn::kInteger:
          if (result_.dtype != dtype::kI64) return false;
          break;
        case Fn::kUniform:
          // In half precision fewer bits are drawn, and what rounds to the end is excluded.
          if (result_.dtype != dtype::kF32) return false;
          break;
        case Fn::kExponential:
        case Fn::kNormal:
          if (dtype::computed_in(result_.dtype) != dtype::kF32) return false;
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
        case Fn::kSum:
        case Fn::kAmax:
        case Fn::kAmin:
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
  bool in_place_ = false;  // the result is an argument
  bool given_ = false;     // that argument is no operand (`out`)
  std::optional<Axes> axes_;
  Elementwise made_;
};

}  // namespace

std::optional<Elementwise> as_elementwise(const graph::Graph& graph, const graph::Node& node) {
  return Analysis(graph, node).run();
}

}  // namespace acc::passes
