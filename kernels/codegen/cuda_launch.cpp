#include "kernels/codegen/cuda_launch.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "kernels/codegen/cuda_words.h"
#include "kernels/codegen/phases.h"

namespace acc::codegen {
namespace {

constexpr int64_t kWarp = 32;
// Threads per multiprocessor: enough to hide what memory takes to answer.
constexpr int64_t kResident = 2048;
// What a thread of a reduction goes through, at least, before another one is worth its share of the
// tree.
constexpr int64_t kElements = 4;

// Blocks below which a GPU is not full, by their threads. Not of the GPU at hand: equal sizes are
// to give equal bits on all of them.
constexpr int64_t kSpread = 128 * kResident;
// What a thread goes through, at least, in a part; and how many parts are worth more launches.
constexpr int64_t kElementsOfPart = 16;
constexpr int64_t kFewestParts = 4;

// No GPU has more memory for a block.
constexpr int64_t kMostShared = int64_t{256} << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t product(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The power of two that is not less, within bounds that are powers of two.
uint32_t power(int64_t count, int64_t least, int64_t most) {
  const auto next = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  return static_cast<uint32_t>(std::clamp(next, least, most));
}

// `blocks`: without parts.
CudaParts parts_of(const KernelSpec& kernel, std::span<const int64_t> sizes,
                   const CudaLaunch& launch, int64_t blocks) {
  if (blocks == 0) return {};  // nothing is kept
  const size_t outermost = sizes.size() - kernel.reduced - (kernel.columns ? 1 : 0);
  const std::span<const int64_t> reduced = sizes.subspan(outermost, kernel.reduced);
  const int64_t threads = launch.x * launch.y;
  const int64_t turns = product(reduced) / (kernel.columns ? launch.y : launch.x);
  const int64_t most = std::min(kSpread / threads / blocks, turns / kElementsOfPart);
  if (most < kFewestParts) return {};
  CudaParts parts;
  if (reduced.size() > 1) parts.outer = std::min(most, reduced.front());
  const int64_t neighbours = kernel.columns ? launch.y : launch.x * kElements;
  parts.inner = std::clamp(reduced.back() / neighbours, int64_t{1}, most / parts.outer);
  return parts.count() < kFewestParts ? CudaParts{} : parts;
}

// A slot for each turn of each thread.
int64_t held_bytes(const KernelSpec& kernel, std::span<const int64_t> sizes,
                   const CudaLaunch& launch) {
  if (kernel.reduced == 0 || kernel.columns || launch.parts.count() > 1) return 0;
  const Held held = find_held(kernel, find_phases(kernel));
  if (held.bytes == 0) return 0;
  const std::span<const int64_t> reduced = sizes.last(kernel.reduced);
  const int64_t neighbours = ceil_div(reduced.back(), int64_t(cuda_neighbours(kernel)));
  int64_t turns = ceil_div(neighbours, launch.x);
  if (reduced.size() > 1) {  // where the row is short, threads go through several rows at once
    const int64_t lanes = power(neighbours, 1, launch.x);
    turns = ceil_div(neighbours, lanes) * ceil_div(reduced[reduced.size() - 2], launch.x / lanes) *
            product(reduced.first(reduced.size() - 2));
  }
  return turns * launch.x * launch.y * int64_t(held.bytes);
}

// Few, where there are rows enough to fill a GPU: each asks for the words of several turns at once,
// and there are fewer to meet in the end.
int64_t threads_of_row(const KernelSpec& kernel, std::span<const int64_t> sizes) {
  const int64_t most = ceil_div(sizes.back(), kElements);
  if (kernel.reduced > 1) return most;  // they go through several rows of elements as it is
  const auto neighbours = int64_t(cuda_neighbours(kernel));
  const int64_t rows = product(sizes.first(sizes.size() - 1));
  const int64_t turns = turns_of_row(kernel);
  return std::min(most, std::max(ceil_div(sizes.back(), neighbours * turns),
                                 kSpread / std::max(rows, int64_t{1})));
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
    made.x = power(threads_of_row(kernel, sizes), kWarp, most);
    made.y = static_cast<uint32_t>(most / made.x);
    blocks = ceil_div(product(sizes.first(kept)), made.y);
  }
  if (kernel.reduced > 0) made.parts = parts_of(kernel, sizes, made, blocks);
  blocks *= made.parts.count();
  const int64_t resident = multiprocessors * kResident / (made.x * made.y);
  made.blocks = static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, resident));
  made.shared = static_cast<uint32_t>(std::min(
      static_cast<int64_t>(cuda_scratch(kernel)) + held_bytes(kernel, sizes, made), kMostShared));
  return made;
}

int cuda_stages(const KernelSpec& kernel) {
  const Phases phases = find_phases(kernel);
  return static_cast<int>(phases.phases.size()) + (phases.kept_stores.empty() ? 0 : 1);
}

size_t cuda_work_words(const KernelSpec& kernel, std::span<const int64_t> sizes, CudaParts parts) {
  const size_t outermost = sizes.size() - kernel.reduced - (kernel.columns ? 1 : 0);
  int64_t kept = product(sizes.first(outermost));
  if (kernel.columns) kept *= sizes.back();
  const auto reductions = std::ranges::count_if(
      kernel.instructions, [](const Instruction& each) { return graph::is_reduction(each.fn); });
  return static_cast<size_t>(reductions * kept * parts.count());
}

std::vector<CudaCalls> cuda_launches(const KernelSpec& kernel,
                                     const std::vector<std::span<const int64_t>>& sizes,
                                     int64_t multiprocessors) {
  std::vector<CudaCalls> made;
  for (size_t call = 0; call < sizes.size(); ++call) {
    const CudaLaunch launch = cuda_launch(kernel, sizes[call], multiprocessors);
    const int stages = launch.parts.count() == 1 ? 0 : cuda_stages(kernel);
    auto group = std::ranges::find_if(made, [&](const CudaCalls& each) {
      return each.launch.x == launch.x && each.launch.y == launch.y && each.stages == stages;
    });
    if (group == made.end()) {
      group =
          made.insert(made.end(), CudaCalls{{0, launch.x, launch.y, {}, 0}, stages, {}, {}, {0}});
    }
    group->calls.push_back(call);
    group->parts.push_back(launch.parts);
    group->launch.blocks += launch.blocks;
    group->launch.shared = std::max(group->launch.shared, launch.shared);
    group->first_blocks.push_back(group->launch.blocks);
  }
  return made;
}

}  // namespace acc::codegen
