#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/codegen/kernel_spec.h"

namespace acc::codegen {

// Threads of a block, at most, and blocks that a multiprocessor is to have room for: registers are
// dealt out for so many. With fewer threads it would wait for memory most of the time.
constexpr int64_t kThreadsAtOnce = 512;
constexpr int64_t kThreadsOfRows = 256;
constexpr int64_t most_threads(const KernelSpec& kernel) {
  return kernel.columns ? kThreadsAtOnce : kThreadsOfRows;
}

// Bytes at the begin of a block's memory, in which its threads exchange values: one of each, or of
// each warp. What is behind holds of rows what fits, so a block may be given any size.
constexpr size_t cuda_scratch(const KernelSpec& kernel) {
  if (kernel.reduced == 0) return 0;
  return 8 * static_cast<size_t>(most_threads(kernel)) / (kernel.columns ? 1 : 32);
}

// Bytes of its rows that a block holds at most, on any GPU: half of the 228 KiB that
// multiprocessors of sm_90 and sm_100 have, less one (kernels/device/cuda_kernels.cpp).
constexpr size_t kMostHeld = size_t{113} << 10;

// In how many parts blocks take the reduced elements of each kept one: of the outermost reduced
// loop, and of the innermost.
struct CudaParts {
  int64_t outer = 1;
  int64_t inner = 1;

  int64_t count() const { return outer * inner; }
};

// Blocks of threads for a kernel of render_cuda. The result of reductions depends on x, y and the
// parts, and so on the sizes of the loops, not on how many blocks there are.
struct CudaLaunch {
  uint32_t blocks = 1;
  uint32_t x = 1;  // threads of a block
  uint32_t y = 1;
  CudaParts parts;
  uint32_t shared = 0;  // bytes of memory that a block has use for: cuda_scratch at least
};

// `sizes`: of the loops, outermost first. `multiprocessors`: of the GPU.
CudaLaunch cuda_launch(const KernelSpec& kernel, std::span<const int64_t> sizes,
                       int64_t multiprocessors);

// Whether few blocks would go through much, one per kept element or strip of them: then each is the
// work of several, stage by stage. No stage needs what another block does in it.
inline bool has_parts(const KernelSpec& kernel, std::span<const int64_t> sizes) {
  return kernel.reduced > 0 && cuda_launch(kernel, sizes, 1).parts.count() > 1;
}

// The stage of a launch that is the only one.
inline constexpr int kAtOnce = -1;

// Launches, one after the other, of a kernel in stages.
int cuda_stages(const KernelSpec& kernel);

// What the blocks of a stage leave for the next ones, in words of 64 bits.
size_t cuda_work_words(const KernelSpec& kernel, std::span<const int64_t> sizes, CudaParts parts);

// One launch, or one for each stage, for all calls of a kernel whose blocks have the same threads.
struct CudaCalls {
  CudaLaunch launch;                  // `blocks`: of all of them
  int stages = 0;                     // 0: all at once
  std::vector<size_t> calls;          // positions in what was given
  std::vector<CudaParts> parts;       // of each
  std::vector<int64_t> first_blocks;  // of each, and how many there are: the begin of the table
};

// `sizes`: of the loops, per call.
std::vector<CudaCalls> cuda_launches(const KernelSpec& kernel,
                                     const std::vector<std::span<const int64_t>>& sizes,
                                     int64_t multiprocessors);

}  // namespace acc::codegen
