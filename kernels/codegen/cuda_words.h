#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/codegen/kernel_spec.h"
#include "kernels/codegen/phases.h"

// How kernels of render_cuda go through memory.
namespace acc::codegen {

// Whether an operand's neighbours are read and written at once.
bool by_words(const KernelSpec& kernel, size_t operand);

// How many neighbours a thread computes at a time.
size_t cuda_neighbours(const KernelSpec& kernel);

// Per operand, whether something computed for each element is made of it as it stands in memory.
std::vector<bool> loaded_by(const KernelSpec& kernel, const std::vector<uint32_t>& instructions,
                            const std::vector<Store>& loads);

// Operands that a phase reads or writes by words and a later one reads again. Each thread comes by
// the same elements in every phase, so it holds them in its block's memory, as far as that goes.
struct Held {
  std::vector<bool> operands;
  std::vector<size_t> first;  // per operand, the first phase that has it
  size_t bytes = 0;           // of neighbours of all of them: a slot
};
Held find_held(const KernelSpec& kernel, const Phases& phases);

// For how many turns along its row a thread asks at once: while all threads wait for one word each,
// memory is idle. Of a phase by operands that registers take; of a kernel by what it holds, or else
// by what its phases read.
int turns_at_once(const KernelSpec& kernel, const std::vector<bool>& operands);
int turns_of_row(const KernelSpec& kernel);

}  // namespace acc::codegen
