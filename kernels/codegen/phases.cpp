#include "kernels/codegen/phases.h"

#include <algorithm>
#include <cstddef>

#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using graph::Fn;

enum class Domain : uint8_t { kConstant, kKept, kFull };

class Split {
 public:
  Split(const KernelSpec& kernel, Again again) : kernel_(kernel), again_(again) {
    for (const Instruction& instruction : kernel.instructions) classify(instruction);
  }

  Phases run() {
    place_roots();
    if (again_ == Again::kLoaded) store_functions();
    for (size_t i = 0; i < size(); ++i) {
      made_.kept.push_back(domain_[i] == Domain::kKept);
      if (domain_[i] == Domain::kConstant) made_.constants.push_back(static_cast<uint32_t>(i));
      if (domain_[i] != Domain::kKept) continue;
      (phase_[i] == 0 ? made_.before : made_.phases[phase_[i] - 1].after)
          .push_back(static_cast<uint32_t>(i));
    }
    for (size_t p = 0; p < made_.phases.size(); ++p) {
      fill(p);
      Phase& phase = made_.phases[p];
      phase.running =
          phase.stores.empty() && std::ranges::all_of(phase.reductions, [&](uint32_t i) {
            return base_of(kernel_, i).has_value();
          });
    }
    return std::move(made_);
  }

 private:
  size_t size() const { return kernel_.instructions.size(); }
  bool reduces(size_t i) const { return graph::is_reduction(kernel_.instructions[i].fn); }

  void classify(const Instruction& instruction) {
    Domain domain = Domain::kConstant;
    uint32_t phase = 0;  // the first in which it can be computed
    if (instruction.fn == Fn::kOperand) {
      domain = kernel_.operands[instruction.index].kept ? Domain::kKept : Domain::kFull;
    } else if (has_position(instruction)) {
      domain = kernel_.positions[instruction.index].kept ? Domain::kKept : Domain::kFull;
    }
    for (int k = 0; k < graph::arity(instruction.fn); ++k) {
      const uint32_t input = instruction.inputs[static_cast<size_t>(k)];
      domain = std::max(domain, domain_[input]);
      phase = std::max(phase, phase_[input]);
    }
    if (graph::is_reduction(instruction.fn)) {
      domain = Domain::kKept;
      ++phase;
    }
    domain_.push_back(domain);
    phase_.push_back(phase);
  }

  // Which phase each reduction and each store belongs to.
  void place_roots() {
    size_t count = 1;
    for (size_t i = 0; i < size(); ++i) {
      if (reduces(i)) count = std::max(count, static_cast<size_t>(phase_[i]));
    }
    for (const Store& store : kernel_.stores) {
      if (is_full(store)) count = std::max(count, size_t{phase_[store.value]} + 1);
    }
    made_.phases.resize(count);
    for (size_t i = 0; i < size(); ++i) {
      if (reduces(i)) made_.phases[phase_[i] - 1].reductions.push_back(static_cast<uint32_t>(i));
    }
    for (const Store& store : kernel_.stores) {
      if (!is_full(store)) {
        made_.kept_stores.push_back(store);
        continue;
      }
      // Memory that is read too keeps its elements until the last phase.
      const size_t phase = is_loaded(store.operand) ? count - 1 : phase_[store.value];
      made_.phases[phase].stores.push_back(store);
    }
  }

  // Functions that a phase computes and the last one needs again wait in results that are written
  // then: a load and a store cost less.
  void store_functions() {
    std::vector<Phase>& phases = made_.phases;
    const std::vector<Store> results = phases.back().stores;
    size_t used = 0;
    for (size_t p = 0; p + 1 < phases.size(); ++p) {
      for (size_t i = size(); i-- > 0;) {
        const Instruction& instruction = kernel_.instructions[i];
        if (!is_slow(instruction.fn) || domain_[i] != Domain::kFull) continue;
        if (!needed_in(p)[i] || !needed_in(phases.size() - 1)[i]) continue;
        if (stored_before(static_cast<uint32_t>(i), p + 1) != nullptr) continue;
        while (used < results.size() && !may_hold(results[used], instruction.dtype)) ++used;
        if (used == results.size()) return;
        phases[p].stores.push_back({results[used++].operand, static_cast<uint32_t>(i)});
      }
    }
  }
  static bool is_slow(Fn fn) {
    return fn == Fn::kPow || (graph::is_function(fn) && fn > Fn::kReciprocal && fn < Fn::kFloor);
  }
  bool may_hold(const Store& result, uint8_t type) const {
    const Operand& operand = kernel_.operands[result.operand];
    return operand.walk == Walk::kContiguous && operand.dtype == type && !is_loaded(result.operand);
  }

  bool is_full(const Store& store) const { return !kernel_.operands[store.operand].kept; }

  bool is_loaded(uint32_t operand) const {
    return std::ranges::any_of(kernel_.instructions, [&](const Instruction& instruction) {
      return instruction.fn == Fn::kOperand && instruction.index == operand;
    });
  }

  // What a phase computes for each element: what its reductions and stores are made of.
  void fill(size_t p) {
    Phase& phase = made_.phases[p];
    const std::vector<bool> needed = needed_in(p);
    for (size_t i = size(); i-- > 0;) {
      if (!needed[i] || domain_[i] != Domain::kFull) continue;
      if (const Store* store = stored_before(static_cast<uint32_t>(i), p)) {
        phase.loads.push_back(*store);
      }
    }
    for (size_t i = 0; i < size(); ++i) {
      if (!needed[i] || domain_[i] != Domain::kFull) continue;
      if (stored_before(static_cast<uint32_t>(i), p) != nullptr) continue;
      phase.instructions.push_back(static_cast<uint32_t>(i));
    }
  }

  // Per instruction: whether a phase's reductions and stores are made of it, but for what earlier
  // phases stored and that is made of.
  std::vector<bool> needed_in(size_t p) const {
    const Phase& phase = made_.phases[p];
    std::vector<bool> needed(size(), false);
    for (const uint32_t reduction : phase.reductions) {
      needed[kernel_.instructions[reduction].inputs[0]] = true;
    }
    for (const Store& store : phase.stores) needed[store.value] = true;
    for (size_t i = size(); i-- > 0;) {
      if (!needed[i] || domain_[i] != Domain::kFull) continue;
      if (stored_before(static_cast<uint32_t>(i), p) != nullptr) continue;
      const Instruction& instruction = kernel_.instructions[i];
      for (int k = 0; k < graph::arity(instruction.fn); ++k) {
        needed[instruction.inputs[static_cast<size_t>(k)]] = true;
      }
    }
    return needed;
  }

  // Where a value stands since an earlier phase, unrounded; null if it does not, or if it was only
  // loaded.
  const Store* stored_before(uint32_t value, size_t p) const {
    const Instruction& instruction = kernel_.instructions[value];
    if (instruction.fn == Fn::kOperand) return nullptr;
    for (size_t earlier = 0; earlier < p; ++earlier) {
      for (const Store& store : made_.phases[earlier].stores) {
        if (store.value != value) continue;
        if (kernel_.operands[store.operand].dtype == instruction.dtype) return &store;
      }
    }
    return nullptr;
  }

  const KernelSpec& kernel_;
  const Again again_;
  std::vector<Domain> domain_;   // per instruction
  std::vector<uint32_t> phase_;  // per instruction
  Phases made_;
};

}  // namespace

Phases find_phases(const KernelSpec& kernel, Again again) { return Split(kernel, again).run(); }

std::optional<uint32_t> base_of(const KernelSpec& kernel, uint32_t sum) {
  const auto& all = kernel.instructions;
  if (all[sum].fn != Fn::kSum) return std::nullopt;
  const Instruction& exponential = all[all[sum].inputs[0]];
  if (exponential.fn != Fn::kExp || exponential.dtype != graph::dtype::kF32) return std::nullopt;
  // x - m, or fma(-1, m, x), which torch.sub is
  const Instruction& below = all[exponential.inputs[0]];
  if (below.fn != Fn::kSub && below.fn != Fn::kFma) return std::nullopt;
  if (below.fn == Fn::kFma) {
    const Instruction& factor = all[below.inputs[0]];
    const Instruction& one = all[factor.inputs[0]];
    if (factor.fn != Fn::kNeg || one.fn != Fn::kConstant || one.constant != 1) return std::nullopt;
  }
  const uint32_t base = below.inputs[1];
  const uint32_t x = below.inputs[below.fn == Fn::kSub ? 0 : 2];
  if (all[base].fn != Fn::kAmax || all[base].inputs[0] != x) return std::nullopt;
  return base;
}

}  // namespace acc::codegen
