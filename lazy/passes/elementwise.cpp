#include "lazy/passes/elementwise.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

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
    if (made_.formula == nullptr || !read_items() || !find_loops()) return std::nullopt;
    if (!add_operands() || !add_results() || !find_type() || !check_terms()) return std::nullopt;
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
    return made_.items.size() == op().arguments.size();
  }

  // The results' words, fresh or in place, without undefined ones; nothing where they are not as
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
    std::erase_if(found,
                  [](const int64_t* item) { return graph::tag_of(*item) == Tag::kUndefined; });
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
    Nest& nest = made_.nest;
    if (made_.formula->over.empty()) {
      nest.sizes.assign(result_.sizes.begin(), result_.sizes.end());
      nest.reduced.assign(nest.sizes.size(), false);
    } else {
      const auto first = std::ranges::find(
          made_.items, Tag::kTensor, [](const int64_t* item) { return graph::tag_of(*item); });
      if (first == made_.items.end()) return false;
      const graph::TensorWords tensor = graph::read_tensor(*first);
      nest.sizes.assign(tensor.sizes.begin(), tensor.sizes.end());
      if (!find_reduced() || product(nest.sizes) == nest.kept_elements()) return false;
    }
    return std::ranges::find(nest.sizes, 0) == nest.sizes.end();
  }

  // Marks the loops that the formula reduces.
  bool find_reduced() {
    const std::string& over = made_.formula->over;
    const size_t dims = made_.nest.sizes.size();
    std::vector<bool>& reduced = made_.nest.reduced;
    if (over == "*") {
      reduced.assign(dims, true);
      return true;
    }
    if (over == "but 1") {
      reduced.assign(dims, true);
      if (dims > 1) reduced[1] = false;
      return dims > 1;
    }
    reduced.assign(dims, false);
    const bool last = over.starts_with("last ");
    const bool first = over.starts_with("before last ");
    const std::string name = last ? over.substr(5) : first ? over.substr(12) : over;
    const auto argument = std::ranges::find(op().arguments, name, &graph::Argument::name);
    if (argument == op().arguments.end()) return false;
    const int64_t* word = made_.items[static_cast<size_t>(argument - op().arguments.begin())];
    std::vector<const int64_t*> items{word};
    if (graph::tag_of(*word) == Tag::kList) items = list_items(word);
    if (graph::tag_of(*word) == Tag::kNone) items.clear();
    if (last || first) {
      if (items.size() > dims) return false;
      const auto middle = reduced.end() - static_cast<std::ptrdiff_t>(items.size());
      std::fill(reduced.begin(), middle, first);
      std::fill(middle, reduced.end(), last);
      return true;
    }
    if (items.empty()) reduced.assign(dims, true);
    for (const int64_t* item : items) {
      if (graph::tag_of(*item) != Tag::kInt || (graph::flags_of(*item) & graph::kValueFlag) != 0) {
        return false;
      }
      const int64_t dim = item[1] < 0 ? item[1] + static_cast<int64_t>(dims) : item[1];
      if (dim < 0 || dim >= static_cast<int64_t>(dims)) return false;
      reduced[static_cast<size_t>(dim)] = true;
    }
    return true;
  }

  static std::vector<const int64_t*> list_items(const int64_t* word) {
    return graph::items({word + 1, graph::item_words(word) - 1});
  }

  static bool is_plain(const graph::TensorWords& tensor) {
    return dtype::is_known(tensor.dtype) &&
           (tensor.flags & (graph::kConjFlag | graph::kNegFlag)) == 0;
  }

  bool add_operands() {
    Nest& nest = made_.nest;
    for (const graph::Term& term : made_.formula->terms) {
      if (term.fn != Fn::kArgument || term.argument >= made_.items.size()) continue;
      if (made_.operands[term.argument] >= 0) continue;
      const int64_t* word = made_.items[term.argument];
      if (graph::tag_of(*word) != Tag::kTensor) continue;
      const graph::TensorWords tensor = graph::read_tensor(word);
      const bool kept = made_.formula->over == "but 1" && tensor.sizes.size() == 1;
      const auto access = kept ? along_kept(tensor) : broadcast(tensor, nest.sizes);
      if (!is_plain(tensor) || !access.has_value()) return false;
      made_.operands[term.argument] = static_cast<int32_t>(nest.accesses.size());
      nest.accesses.push_back(*access);
    }
    return true;
  }

  // The access of a tensor that has the kept dimensions only.
  std::optional<Access> along_kept(const graph::TensorWords& tensor) const {
    const Nest& nest = made_.nest;
    Access access{tensor.buffer, tensor.dtype, tensor.offset,
                  std::vector<int64_t>(nest.sizes.size(), 0)};
    size_t next = 0;
    for (size_t i = 0; i < nest.sizes.size(); ++i) {
      if (nest.reduced[i]) continue;
      if (next == tensor.sizes.size() || tensor.sizes[next] != nest.sizes[i]) return std::nullopt;
      access.strides[i] = nest.sizes[i] == 1 ? 0 : tensor.strides[next];
      ++next;
    }
    if (next != tensor.sizes.size()) return std::nullopt;
    return access;
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
    const bool kept = tensor.sizes.size() < nest.sizes.size();
    const auto access = kept ? along_kept(tensor) : broadcast(tensor, nest.sizes);
    if (!access.has_value()) return false;
    made_.results.push_back({static_cast<uint32_t>(nest.accesses.size()), term});
    nest.accesses.push_back(*access);
    // Broadcast along reduced loops only.
    std::vector<int64_t> sizes;
    Access result = *access;
    result.strides.clear();
    for (size_t i = 0; i < nest.sizes.size(); ++i) {
      const bool full = !kept && tensor.sizes[i] == nest.sizes[i];
      if (nest.reduced[i] && !full) continue;
      sizes.push_back(nest.sizes[i]);
      result.strides.push_back(access->strides[i]);
    }
    return is_injective(result, sizes);
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
      // What is computed before it goes to `out` has a type of its own.
      if (given_ && own != type) return false;
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
  Elementwise made_;
};

}  // namespace

std::optional<Elementwise> as_elementwise(const graph::Graph& graph, const graph::Node& node) {
  return Analysis(graph, node).run();
}

}  // namespace acc::passes
