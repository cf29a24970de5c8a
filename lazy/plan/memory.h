#pragma once

#include <cstdint>
#include <span>
#include <vector>

// Places the intermediates of a plan in its arena: lifetimes in, offsets out.
namespace acc::plan {

// Every offset and the size of the arena are multiples of this. It is what cudaMalloc guarantees
// for a fresh block, so that a library kernel which picks its variant by alignment picks the same
// one in the arena; it also keeps two buffers out of one cache line on the host.
inline constexpr uint64_t kArenaAlignment = 256;

// A buffer that is in use from step `first` to step `last`, both included: two lifetimes that share
// a step are live together.
struct Lifetime {
  uint64_t bytes = 0;
  uint32_t first = 0;
  uint32_t last = 0;
};

struct Layout {
  std::vector<uint64_t> offsets;  // one per lifetime
  uint64_t bytes = 0;             // of the arena
  uint64_t visits = 0;            // looks at parts of the trees and heaps: what it took
};

// Deterministic: the same lifetimes in the same order give the same layout on every machine. A
// lifetime of 0 bytes gets offset 0 and takes no room. Throws base::Error for first > last and for
// sizes whose sum does not fit in 62 bits.
Layout plan_memory(std::span<const Lifetime> lifetimes);

// The most bytes that are live at one step, each buffer rounded up to kArenaAlignment: no layout is
// smaller. Same errors as plan_memory.
uint64_t peak_live_bytes(std::span<const Lifetime> lifetimes);

}  // namespace acc::plan
