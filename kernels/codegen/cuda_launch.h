#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/codegen/kernel_spec.h"

namespace acc::codegen {

// Threads of a block, at most: registers are dealt out for so many.
constexpr int64_t most_threads(const KernelSpec& kernel) { return kernel.columns ? 1024 : 256; }

// Blocks of threads for a kernel of render_cuda. The result of reductions depends on x and y, and
// so on the sizes of the loops, not on how many blocks there are. One kept element is the work of
// one block, however many are reduced to it.
struct CudaLaunch {
  uint32_t blocks = 1;
  uint32_t x = 1;  // threads of a block
  uint32_t y = 1;
};

// `sizes`: of the loops, outermost first. `multiprocessors`: of the GPU.
CudaLaunch cuda_launch(const KernelSpec& kernel, std::span<const int64_t> sizes,
                       int64_t multiprocessors);

// One launch for all calls of a kernel whose blocks have the same threads.
struct CudaCalls {
  CudaLaunch launch;                  // `blocks`: of all of them
  std::vector<size_t> calls;          // positions in what was given
  std::vector<int64_t> first_blocks;  // of each, and how many there are: the begin of the table
};

// `sizes`: of the loops, per call.
std::vector<CudaCalls> cuda_launches(const KernelSpec& kernel,
                                     const std::vector<std::span<const int64_t>>& sizes,
                                     int64_t multiprocessors);

}  // namespace acc::codegen
