#include "kernels/codegen/cuda_words.h"

#include <algorithm>

#include "lazy/graph/words.h"

namespace acc::codegen {
namespace {

constexpr size_t kRegister = 4;  // bytes
// What half the registers of a thread hold.
constexpr size_t kBytesOfNeighbours = 256;

size_t element_size(const KernelSpec& kernel, size_t operand) {
  return graph::element_bytes(kernel.operands[operand].dtype);
}

}  // namespace

bool by_words(const KernelSpec& kernel, size_t operand) {
  return !kernel.columns && kernel.operands[operand].walk == Walk::kContiguous &&
         !kernel.operands[operand].kept;
}

// For 16 bytes of the largest type, within limits: more of them would take registers away from
// other threads, and those of very many operands would not have registers.
size_t cuda_neighbours(const KernelSpec& kernel) {
  size_t largest = 0;
  size_t all = 0;  // of registers
  for (size_t i = 0; i < kernel.operands.size(); ++i) {
    if (!by_words(kernel, i)) continue;
    largest = std::max(largest, element_size(kernel, i));
    all += std::max(element_size(kernel, i), kRegister);
  }
  if (largest == 0) return 1;
  // Each neighbour has a value to be added, and a sum of its own.
  for (const Instruction& instruction : kernel.instructions) {
    if (graph::is_reduction(instruction.fn)) all += 2 * kRegister;
  }
  size_t count = std::clamp(16 / largest, size_t{4}, size_t{8});
  while (count > 1 && count * all > kBytesOfNeighbours) count /= 2;
  return count;
}

std::vector<bool> loaded_by(const KernelSpec& kernel, const std::vector<uint32_t>& instructions,
                            const std::vector<Store>& loads) {
  std::vector<bool> loaded(kernel.operands.size());
  for (const uint32_t i : instructions) {
    const Instruction& instruction = kernel.instructions[i];
    if (instruction.fn == graph::Fn::kOperand) loaded[instruction.index] = true;
  }
  for (const Store& store : loads) loaded[store.operand] = true;
  return loaded;
}

Held find_held(const KernelSpec& kernel, const Phases& phases) {
  const size_t none = phases.phases.size();
  Held held{std::vector<bool>(kernel.operands.size()),
            std::vector<size_t>(kernel.operands.size(), none)};
  for (size_t p = 0; p < none; ++p) {
    const Phase& phase = phases.phases[p];
    std::vector<bool> had = loaded_by(kernel, phase.instructions, phase.loads);
    for (size_t i = 0; i < had.size(); ++i) {
      if (had[i] && held.first[i] < p && by_words(kernel, i)) held.operands[i] = true;
    }
    for (const Store& store : phase.stores) had[store.operand] = true;
    for (size_t i = 0; i < had.size(); ++i) {
      if (had[i]) held.first[i] = std::min(held.first[i], p);
    }
  }
  for (size_t i = 0; i < kernel.operands.size(); ++i) {
    if (held.operands[i]) held.bytes += cuda_neighbours(kernel) * element_size(kernel, i);
  }
  return held;
}

}  // namespace acc::codegen
