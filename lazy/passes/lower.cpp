#include "lazy/passes/lower.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "csrc/base/check.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/elementwise.h"

namespace acc::passes {
namespace {

using codegen::Instruction;
using codegen::Walk;
using graph::Fn;
using graph::Tag;
namespace dtype = graph::dtype;

constexpr uint32_t kNone = UINT32_MAX;

// Whether an access stays at one element while the reduced loops, of which there are some, turn.
bool is_kept(const Nest& nest, const Access& access) {
  for (size_t loop = 0; loop < nest.sizes.size(); ++loop) {
    if (nest.reduced[loop] && access.strides[loop] != 0) return false;
  }
  return nest.reduces();
}

// A reduced loop shorter than this leaves vectors mostly empty; then they go along a kept loop,
// where there is one of this length.
constexpr int64_t kShortLoop = 32;
// Of several reduced loops the sums of the innermost go on, and lanes are added up once at the end.
constexpr int64_t kShortOfSeveral = 16;

// The loop in which most operands go from element to element. Stores count twice: a strided load is
// a gather, a strided store a loop. What has one element per reduction does not count.
size_t fastest_loop(const Nest& nest, const std::vector<bool>& writes) {
  size_t best = nest.sizes.size() - 1;
  int best_score = -1;
  for (size_t loop = nest.sizes.size(); loop-- > 0;) {
    int score = 0;
    for (size_t i = 0; i < nest.accesses.size(); ++i) {
      const Access& access = nest.accesses[i];
      if (access.buffer == kNoBuffer || is_kept(nest, access)) continue;
      if (access.strides[loop] == 1) score += writes[i] ? 2 : 1;
    }
    if (score > best_score) {
      best = loop;
      best_score = score;
    }
  }
  const bool several = std::ranges::count(nest.reduced, true) > 1;
  const int64_t least = several ? kShortOfSeveral : kShortLoop;
  if (!nest.reduced[best] || nest.sizes[best] >= least) return best;
  size_t longest = best;
  for (size_t loop = 0; loop < nest.sizes.size(); ++loop) {
    if (nest.reduced[loop] || nest.sizes[loop] < kShortLoop) continue;
    if (longest == best || nest.sizes[loop] > nest.sizes[longest]) longest = loop;
  }
  return longest;
}

// Kept loops outside reduced ones, and the vectors' loop innermost.
void order_for_vectors(Nest& nest, const std::vector<bool>& writes) {
  const size_t fastest = fastest_loop(nest, writes);
  std::vector<size_t> order(nest.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t loop) {
    return loop == fastest ? 2 : nest.reduced[loop] ? 1 : 0;
  });
  reorder(nest, order);
}

class Lowering {
 public:
  Lowering(const graph::Graph& graph, const Cluster& cluster, const std::vector<bool>& stored,
           bool alike)
      : graph_(graph), cluster_(cluster), stored_(stored), alike_(alike), nest_(cluster.nest) {}

  Lowered run() {
    for (const uint32_t node : cluster_.nodes) {
      nodes_.push_back(as_elementwise(graph_, graph_.nodes[node]).value());
    }
    order_loops();
    made_.kernel.loops = static_cast<uint32_t>(nest_.sizes.size());
    made_.kernel.reduced = static_cast<uint32_t>(std::ranges::count(nest_.reduced, true));
    made_.kernel.columns = nest_.reduces() && !nest_.reduced.back();
    for (size_t i = 0; i < cluster_.nodes.size(); ++i) add_node(i);
    add_stores();
    made_.launch.elements = nest_.kept_elements();
    made_.launch.turns = product(nest_.sizes) / made_.launch.elements;
    std::vector<int64_t> geometry = nest_.sizes;
    for (const auto& accesses : {operands_, positions_}) {
      for (const uint32_t access : accesses) {
        const std::vector<int64_t>& strides = nest_.accesses[access].strides;
        geometry.insert(geometry.end(), strides.begin(), strides.end());
      }
    }
    made_.launch.geometry = std::move(geometry);
    return std::move(made_);
  }

 private:
  // Memory that the kernel touches, and the value that is there at this point of the program.
  struct Place {
    uint32_t access;
    uint32_t value;
    uint32_t operand = kNone;  // once it was loaded
    bool written = false;
  };

  void order_loops() {
    if (nest_.sizes.empty()) {
      // A single element.
      nest_.sizes = {1};
      nest_.reduced = {false};
      for (Access& access : nest_.accesses) access.strides = {1};
      return;
    }
    std::vector<bool> writes(nest_.accesses.size());
    for (size_t i = 0; i < nodes_.size(); ++i) {
      for (const auto& result : nodes_[i].results) writes[cluster_.first[i] + result.access] = true;
    }
    order_for_vectors(nest_, writes);
    coalesce(nest_);
  }

  bool same_place(const Access& a, const Access& b) const {
    const graph::Buffer& x = graph_.buffers[a.buffer];
    const graph::Buffer& y = graph_.buffers[b.buffer];
    if (a.dtype != b.dtype || a.strides != b.strides || x.group != y.group) return false;
    if (a.buffer == b.buffer) return a.offset == b.offset;
    // Of a storage that nobody writes, only one buffer per beginning is known.
    const auto bytes = static_cast<int64_t>(graph::element_bytes(a.dtype));
    return x.written && x.group_offset + a.offset * bytes == y.group_offset + b.offset * bytes;
  }

  bool is_stored(const Place& place) const { return stored_[nest_.accesses[place.access].buffer]; }

  Place* find_place(const Access& access) {
    for (Place& place : places_) {
      if (same_place(nest_.accesses[place.access], access)) return &place;
    }
    return nullptr;
  }

  uint32_t add(const Instruction& instruction) {
    std::vector<Instruction>& all = made_.kernel.instructions;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == instruction) return static_cast<uint32_t>(i);
    }
    all.push_back(instruction);
    return static_cast<uint32_t>(all.size() - 1);
  }

  uint8_t type_of(uint32_t value) const { return made_.kernel.instructions[value].dtype; }

  uint32_t cast(uint32_t value, uint8_t type) {
    if (type_of(value) == type) return value;
    Instruction instruction;
    instruction.fn = Fn::kCast;
    instruction.dtype = type;
    instruction.inputs[0] = value;
    return add(instruction);
  }

  // To a half type and back.
  uint32_t round_to(uint32_t value, uint8_t half) {
    const Instruction& made = made_.kernel.instructions[value];
    if (made.fn == Fn::kCast && made.index == half) return value;
    Instruction instruction;
    instruction.fn = Fn::kCast;
    instruction.dtype = dtype::kF32;
    instruction.inputs[0] = value;
    instruction.index = half;
    return add(instruction);
  }

  static Walk walk_of(const Access& access) {
    const int64_t stride = access.strides.back();
    return stride == 0 ? Walk::kBroadcast : stride == 1 ? Walk::kContiguous : Walk::kStrided;
  }

  uint32_t add_position(uint32_t access) {
    const Access& counter = nest_.accesses[access];
    const auto found = std::ranges::find_if(positions_, [&](uint32_t other) {
      return nest_.accesses[other].strides == counter.strides;
    });
    const auto index = static_cast<uint32_t>(found - positions_.begin());
    if (found == positions_.end()) {
      positions_.push_back(access);
      made_.kernel.positions.push_back({walk_of(counter), is_kept(nest_, counter)});
    }
    return index;
  }

  // The element's index along a dimension.
  uint32_t position(uint32_t access) {
    Instruction instruction;
    instruction.fn = Fn::kPosition;
    instruction.dtype = dtype::kF32;
    instruction.index = add_position(access);
    return add(instruction);
  }

  // Of the element's random words; of arguments, which are integers.
  uint32_t drawn(const Elementwise& node, const graph::Term& term, uint32_t access) {
    Instruction instruction;
    instruction.fn = term.fn;
    instruction.dtype = term.truth ? dtype::kBool : node.computed;
    instruction.index = add_position(access);
    for (size_t i = 0; i < static_cast<size_t>(graph::arity(term.fn)); ++i) {
      const uint32_t place = node.formula->terms[term.inputs[i]].argument;
      const int64_t* word = node.items[place];
      const bool varies = (graph::flags_of(*word) & graph::kValueFlag) != 0;
      const Number number = varies ? Number{false, node.values[place]} : Number{true, word[1]};
      instruction.inputs[i] = add_number(number, false, dtype::kI64);
    }
    return add(instruction);
  }

  // Per term, whether only draws use it: not as a number of the type that is computed in.
  static std::vector<bool> used_by_draws(const graph::Formula& formula) {
    std::vector<bool> used(formula.terms.size(), false);
    for (const graph::Term& term : formula.terms) {
      if (!graph::is_draw(term.fn)) continue;
      for (int i = 0; i < graph::arity(term.fn); ++i) used[term.inputs[i]] = true;
    }
    return used;
  }

  uint32_t add_operand(uint32_t access, bool stored) {
    const Access& memory = nest_.accesses[access];
    made_.kernel.operands.push_back(
        {memory.dtype, walk_of(memory), stored, is_kept(nest_, memory)});
    made_.launch.operands.push_back(
        {memory.buffer, memory.offset * static_cast<int64_t>(graph::element_bytes(memory.dtype)),
         stored});
    operands_.push_back(access);
    return static_cast<uint32_t>(made_.kernel.operands.size() - 1);
  }

  uint32_t load(uint32_t access) {
    const Access& memory = nest_.accesses[access];
    if (const Place* place = find_place(memory)) {
      // Whoever reads memory finds there what was stored, and so does the kernel that stores it: a
      // difference between the two is what compensated sums live from.
      const bool rounds =
          place->written && dtype::is_half(memory.dtype) && (alike_ || is_stored(*place));
      return rounds ? round_to(place->value, memory.dtype) : place->value;
    }
    const uint32_t operand = add_operand(access, false);
    Instruction instruction;
    instruction.fn = Fn::kOperand;
    instruction.index = operand;
    const bool small =
        memory.dtype == dtype::kU8 || memory.dtype == dtype::kI8 || memory.dtype == dtype::kI16;
    instruction.dtype = small ? dtype::kI32 : dtype::computed_in(memory.dtype);
    const uint32_t value = add(instruction);
    places_.push_back({access, value, operand, false});
    return value;
  }

  uint32_t add_constant(double number, uint8_t type) {
    Instruction instruction;
    instruction.fn = Fn::kConstant;
    instruction.dtype = type;
    instruction.constant = number;
    return add(instruction);
  }

  uint32_t add_number(Number number, bool floating, uint8_t type) {
    auto& numbers = made_.launch.numbers;
    const auto found = std::ranges::find(numbers, number);
    const auto index = static_cast<uint32_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(number);
      made_.kernel.scalars.push_back(floating);
    }
    Instruction instruction;
    instruction.fn = Fn::kScalar;
    instruction.dtype = type;
    instruction.index = index;
    return add(instruction);
  }

  uint32_t argument(const Elementwise& node, const graph::Term& term, uint32_t first) {
    if (const int32_t operand = node.operands[term.argument]; operand >= 0) {
      const uint32_t value = load(first + static_cast<uint32_t>(operand));
      return term.truth ? value : cast(value, node.computed);
    }
    const int64_t* word = node.items[term.argument];
    const Tag tag = graph::tag_of(*word);
    const bool floating =
        tag == Tag::kFloat || (tag == Tag::kNumber && dtype::is_floating(graph::dtype_of(*word)));
    if ((graph::flags_of(*word) & graph::kValueFlag) != 0 || tag == Tag::kNumber) {
      return add_number({false, node.values[term.argument]}, floating, node.computed);
    }
    const double number = floating ? std::bit_cast<double>(word[1]) : static_cast<double>(word[1]);
    // Whole numbers are few, and a compiler makes something of them (a factor of 1).
    if (number != std::trunc(number)) return add_number({true, word[1]}, floating, node.computed);
    return add_constant(number, node.computed);
  }

  void add_node(size_t i) {
    const Elementwise& node = nodes_[i];
    std::vector<uint32_t> values;
    const std::vector<bool> drawn_with = used_by_draws(*node.formula);
    for (const graph::Term& term : node.formula->terms) {
      if (drawn_with[values.size()]) {
        values.push_back(kNone);
      } else if (graph::is_draw(term.fn)) {
        values.push_back(drawn(node, term, cluster_.first[i] + static_cast<uint32_t>(node.index)));
      } else if (term.fn == Fn::kArgument) {
        values.push_back(argument(node, term, cluster_.first[i]));
      } else if (term.fn == Fn::kPosition) {
        const uint32_t access = cluster_.first[i] + static_cast<uint32_t>(node.position);
        values.push_back(cast(position(access), node.computed));
      } else if (term.fn == Fn::kCount) {
        const int64_t all = product(node.nest.sizes);
        const int64_t count = node.nest.reduces() ? all / node.nest.kept_elements() : all;
        values.push_back(add_number({true, count}, false, node.computed));
      } else if (term.fn == Fn::kConstant) {
        values.push_back(add_constant(term.constant, node.computed));
      } else {
        Instruction instruction;
        instruction.fn = term.fn;
        instruction.dtype = term.truth ? dtype::kBool : node.computed;
        for (int k = 0; k < graph::arity(term.fn); ++k) {
          instruction.inputs[static_cast<size_t>(k)] = values[term.inputs[k]];
        }
        values.push_back(add(instruction));
      }
    }
    for (const Elementwise::Result& result : node.results) {
      const uint8_t type = nest_.accesses[cluster_.first[i] + result.access].dtype;
      uint32_t value = cast(values[result.term], dtype::computed_in(type));
      if (node.rounded != 0 && type != dtype::kBool) value = round_to(value, node.rounded);
      if (graph_.nodes[cluster_.nodes[i]].seen && dtype::is_half(type)) {
        value = round_to(value, type);
      }
      put(cluster_.first[i] + result.access, value);
    }
  }

  void put(uint32_t access, uint32_t value) {
    if (Place* place = find_place(nest_.accesses[access])) {
      place->value = value;
      place->written = true;
    } else {
      places_.push_back({access, value, kNone, true});
    }
  }

  void add_stores() {
    for (const Place& place : places_) {
      if (!place.written || !is_stored(place)) continue;
      uint32_t operand = place.operand;
      if (operand == kNone) {
        operand = add_operand(place.access, true);
      } else {
        made_.kernel.operands[operand].stored = true;
        made_.launch.operands[operand].stored = true;
      }
      made_.kernel.stores.push_back({operand, place.value});
    }
  }

  const graph::Graph& graph_;
  const Cluster& cluster_;
  const std::vector<bool>& stored_;
  const bool alike_;
  Nest nest_;
  std::vector<Elementwise> nodes_;
  std::vector<Place> places_;
  std::vector<uint32_t> operands_;   // per operand of the kernel, its access
  std::vector<uint32_t> positions_;  // per position of the kernel, its access
  Lowered made_;
};

}  // namespace

Lowered lower(const graph::Graph& graph, const Cluster& cluster, const std::vector<bool>& stored,
              bool alike) {
  return Lowering(graph, cluster, stored, alike).run();
}

}  // namespace acc::passes
