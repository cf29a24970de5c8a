#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/codegen/kernel_spec.h"

// In which order a kernel with reductions computes what. A reduction has its value only when all
// elements were seen, so the elements are gone through once per phase, and the value of a reduction
// is there from the next phase on. What varies along the reduced loops is computed again in each
// phase that needs it, or loaded again if it was stored.
namespace acc::codegen {

struct Phase {
  std::vector<Store> loads;            // what an earlier phase stored, for each element
  std::vector<uint32_t> instructions;  // for each element
  std::vector<uint32_t> reductions;    // over what those compute
  std::vector<Store> stores;           // of each element
  std::vector<uint32_t> after;         // once, when the reductions are done
  bool running = false;  // it is for nothing but sums that the phase before can keep (base_of)
};

struct Phases {
  std::vector<bool> kept;           // per instruction: once per kept element, not for each
  std::vector<uint32_t> constants;  // made of numbers only
  std::vector<uint32_t> before;     // once per kept element, before the first phase
  std::vector<Phase> phases;
  std::vector<Store> kept_stores;  // at the end
};

// What becomes of a function that two phases need.
enum class Again : uint8_t {
  kComputed,
  kLoaded,  // where a result has room for it until the last phase
};
Phases find_phases(const KernelSpec& kernel, Again again = Again::kComputed);

// Of a sum of exp(x - m) in float32 where m is the largest x: m. Such a sum needs no phase of its
// own: made of exp(x - b) it becomes that of any other b by a factor, so it can run along while m
// is looked for (Milakov and Gimelshein, 2018).
std::optional<uint32_t> base_of(const KernelSpec& kernel, uint32_t sum);

}  // namespace acc::codegen
