#include "kernels/codegen/cuda_launch.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

namespace acc::codegen {
namespace {

constexpr int64_t kWarp = 32;
// Threads per multiprocessor: enough to hide what memory takes to answer.
constexpr int64_t kResident = 2048;
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
  const int64_t most = most_threads(kernel);
  const size_t kept = sizes.size() - kernel.reduced;
  CudaLaunch made;
  int64_t blocks = 0;
  if (kernel.reduced == 0) {
    made.x = static_cast<uint32_t>(most);
    blocks = ceil_div(product(sizes), most * kElements);
  } else if (kernel.columns) {
    made.x = kWarp;
    made.y = power(ceil_div(sizes[sizes.size() - 2], kElements), 1, most / kWarp);
    blocks = ceil_div(sizes.back(), made.x) * product(sizes.first(kept - 1));
  } else {
    made.x = power(ceil_div(sizes.back(), kElements), kWarp, most);
    made.y = static_cast<uint32_t>(most / made.x);
    blocks = ceil_div(product(sizes.first(kept)), made.y);
  }
  const int64_t resident = multiprocessors * kResident / (made.x * made.y);
  made.blocks = static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, resident));
  return made;
}

std::vector<CudaCalls> cuda_launches(const KernelSpec& kernel,
                                     const std::vector<std::span<const int64_t>>& sizes,
                                     int64_t multiprocessors) {
  std::vector<CudaCalls> made;
  for (size_t call = 0; call < sizes.size(); ++call) {
    const CudaLaunch launch = cuda_launch(kernel, sizes[call], multiprocessors);
    auto group = std::ranges::find_if(made, [&](const CudaCalls& each) {
      return each.launch.x == launch.x && each.launch.y == launch.y;
    });
    if (group == made.end()) {
      group = made.insert(made.end(), CudaCalls{{0, launch.x, launch.y}, {}, {0}});
    }
    group->calls.push_back(call);
    group->launch.blocks += launch.blocks;
    group->first_blocks.push_back(group->launch.blocks);
  }
  return made;
}

}  // namespace acc::codegen
