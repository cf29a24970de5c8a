#include "kernels/codegen/cuda_words.h"

#include <algorithm>
#include <bit>

#include "lazy/graph/words.h"

namespace acc::codegen {
namespace {

constexpr size_t kRegister = 4;  // bytes
// What half the registers of a thread hold.
constexpr size_t kBytesOfNeighbours = 256;

size_t element_size(const KernelSpec& kernel, size_t operand) {
  return graph::element_bytes(kernel.operands[operand].dtype);
}

constexpr size_t kBytesUnderWay = 96;
constexpr size_t kMostTurns = 4;

// Of registers, for each neighbour: its words, and of what is reduced a value to be added and a
// sum.
size_t bytes_of_neighbour(const KernelSpec& kernel) {
  size_t bytes = 0;
  for (size_t i = 0; i < kernel.operands.size(); ++i) {
    if (by_words(kernel, i)) bytes += std::max(element_size(kernel, i), kRegister);
  }
  for (const Instruction& instruction : kernel.instructions) {
    if (graph::is_reduction(instruction.fn)) bytes += 2 * kRegister;
  }
  return bytes;
}

// Of a thread's neighbours, those of some operands.
size_t bytes_of_words(const KernelSpec& kernel, const std::vector<bool>& operands) {
  size_t bytes = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i] && by_words(kernel, i)) bytes += element_size(kernel, i);
  }
  return cuda_neighbours(kernel) * bytes;
}

// What a thread asks for at once, at most, where a turn is not more.
int turns_of(size_t bytes) {
  if (bytes == 0) return 1;
  return static_cast<int>(
      std::bit_floor(std::clamp(kBytesUnderWay / bytes, size_t{1}, kMostTurns)));
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
  for (size_t i = 0; i < kernel.operands.size(); ++i) {
    if (by_words(kernel, i)) largest = std::max(largest, element_size(kernel, i));
  }
  if (largest == 0) return 1;
  const size_t bytes = bytes_of_neighbour(kernel);
  size_t count = std::clamp(16 / largest, size_t{4}, size_t{8});
  while (count > 1 && count * bytes > kBytesOfNeighbours) count /= 2;
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
  held.bytes = bytes_of_words(kernel, held.operands);
  return held;
}

int turns_at_once(const KernelSpec& kernel, const std::vector<bool>& operands) {
  const size_t bytes = bytes_of_words(kernel, operands);
  const size_t others =
      cuda_neighbours(kernel) * bytes_of_neighbour(kernel) + sizeof(void*) * kernel.operands.size();
  int turns = turns_of(bytes);
  while (turns > 1 && others + (turns - 1) * bytes > kBytesOfNeighbours) turns /= 2;
  return turns;
}

int turns_of_row(const KernelSpec& kernel) {
  const Phases phases = find_phases(kernel);
  const size_t held = find_held(kernel, phases).bytes;
  if (held > 0) return turns_of(held);
  int turns = kMostTurns;
  for (const Phase& phase : phases.phases) {
    turns =
        std::min(turns, turns_at_once(kernel, loaded_by(kernel, phase.instructions, phase.loads)));
  }
  return turns;
}

}  // namespace acc::codegen
