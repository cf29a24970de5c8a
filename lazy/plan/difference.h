#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lazy/graph/graph.h"

// Where a recorded step first differs from one that a plan was made of, for people who want to know
// why there is a new plan.
namespace acc::plan {

enum class Change : uint8_t {
  kNothing,
  kOperator,  // another one is called, or some more, or some fewer
  kLonger,    // the new step goes on
  kShorter,   // it ends earlier
  kSetting,   // a setting of the process or the thread
  kArgument,  // of the same operator
  kMemory,    // which arguments share memory, or had contents when the step began
};

// The aspect of another operator where nothing shows that some were put in or left out.
inline constexpr std::string_view kAnotherOperator = "operator";

struct Difference {
  Change change = Change::kNothing;
  size_t node = 0;       // how many operators are the same before it
  std::string op;        // of the new step; where that ends earlier, its last one
  uint32_t source = 0;   // where the program recorded it
  std::string argument;  // "self", "tensors[2]", "a result"; "" where operators differ
  std::string aspect;    // "shape", "dtype", "strides", "value", ...
  std::string before;
  std::string after;
  uint64_t ambient_before = 0;  // of settings, see csrc/runtime/ambient.h
  uint64_t ambient_after = 0;
};

// How many operators, from the first on, are the same in both, whatever their arguments.
size_t common_operators(const graph::Graph& a, const graph::Graph& b);

Difference difference(const graph::Graph& before, const graph::Graph& now);

}  // namespace acc::plan
