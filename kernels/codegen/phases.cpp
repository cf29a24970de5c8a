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
  explicit Split(const KernelSpec& kernel) : kernel_(kernel) {
    for (const Instruction& instruction : kernel.instructions) classify(instruction);
  }

  Phases run() {
    place_roots();
    for (size_t i = 0; i < size(); ++i) {
      made_.kept.push_back(domain_[i] == Domain::kKept);
      if (domain_[i] == Domain::kConstant) made_.constants.push_back(static_cast<uint32_t>(i));
      if (domain_[i] != Domain::kKept) continue;
      (phase_[i] == 0 ? made_.before : made_.phases[phase_[i] - 1].after)
          .push_back(static_cast<uint32_t>(i));
    }
    for (size_t p = 0; p < made_.phases.size(); ++p) fill(p);
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

  bool is_full(const Store& store) const { return !kernel_.operands[store.operand].kept; }

  bool is_loaded(uint32_t operand) const {
    return std::ranges::any_of(kernel_.instructions, [&](const Instruction& instruction) {
      return instruction.fn == Fn::kOperand && instruction.index == operand;
    });
  }

  // What a phase computes for each element: what its reductions and stores are made of.
  void fill(size_t p) {
    Phase& phase = made_.phases[p];
    std::vector<bool> needed(size(), false);
    for (const uint32_t reduction : phase.reductions) {
      needed[kernel_.instructions[reduction].inputs[0]] = true;
    }
    for (const Store& store : phase.stores) needed[store.value] = true;
    for (size_t i = size(); i-- > 0;) {
      if (!needed[i] || domain_[i] != Domain::kFull) continue;
      const Instruction& instruction = kernel_.instructions[i];
      if (const Store* store = stored_before(static_cast<uint32_t>(i), p)) {
        phase.loads.push_back(*store);
        needed[i] = false;
        continue;
      }
      for (int k = 0; k < graph::arity(instruction.fn); ++k) {
        needed[instruction.inputs[static_cast<size_t>(k)]] = true;
      }
    }
    for (size_t i = 0; i < size(); ++i) {
      if (needed[i] && domain_[i] == Domain::kFull) {
        phase.instructions.push_back(static_cast<uint32_t>(i));
      }
    }
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
  std::vector<Domain> domain_;   // per instruction
  std::vector<uint32_t> phase_;  // per instruction
  Phases made_;
};

}  // namespace

Phases find_phases(const KernelSpec& kernel) { return Split(kernel).run(); }

}  // namespace acc::codegen
