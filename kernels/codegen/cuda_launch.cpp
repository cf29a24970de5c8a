#include "kernels/codegen/cuda_launch.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

namespace acc::codegen {
namespace {

constexpr int64_t kThreads = 256;  // of a block: most_threads
constexpr int64_t kWarp = 32;
// Blocks per multiprocessor, of kThreads: enough to hide what memory takes to answer.
constexpr int64_t kBlocks = 8;
// What a thread of a reduction goes through, at least, before another one is worth its share of the
// tree.
constexpr int64_t kElements = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t product(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The power of two that is not less, within bounds that are powers of two.
uint32_t power(int64_t count, int64_t least, int64_t most) {
  const auto next = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  return static_cast<uint32_t>(std::clamp(next, least, most));
}

}  // namespace

CudaLaunch cuda_launch(const KernelSpec& kernel, std::span<const int64_t> sizes,
                       int64_t multiprocessors) {
  const auto blocks = [&](int64_t wanted, int64_t threads) {
    const int64_t most = multiprocessors * kBlocks * std::max<int64_t>(kThreads / threads, 1);
    return static_cast<uint32_t>(std::clamp<int64_t>(wanted, 1, most));
  };
  CudaLaunch made;
  const size_t kept = sizes.size() - kernel.reduced;
  if (kernel.reduced == 0) {
    made.x = kThreads;
    made.blocks = blocks(ceil_div(product(sizes), kThreads * kElements), kThreads);
  } else if (kernel.columns) {
    made.x = kWarp;
    made.y = power(ceil_div(sizes[sizes.size() - 2], kElements), 1, most_threads(kernel) / kWarp);
    const int64_t strips = ceil_div(sizes.back(), made.x);
    made.blocks = blocks(strips * product(sizes.first(kept - 1)), made.x * made.y);
  } else {
    made.x = power(ceil_div(sizes.back(), kElements), kWarp, kThreads);
    made.y = static_cast<uint32_t>(kThreads / made.x);
    made.blocks = blocks(ceil_div(product(sizes.first(kept)), made.y), kThreads);
  }
  return made;
}

}  // namespace acc::codegen
