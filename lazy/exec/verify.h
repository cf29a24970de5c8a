#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lazy/exec/runner.h"

// Runs a plan beside what it stands for: each operator as it was recorded, by ATen's CPU kernels.
namespace acc::exec {

// An operator of a plan, for people: its name and where it was recorded.
using NamedOp = std::pair<std::string, uint32_t>;

// A value of the plan that is another one than ATen's.
struct Mismatch {
  NamedOp op;                  // that makes it
  size_t recorded = 0;         // its place in the recording
  std::string value;           // "result 0", or the argument that it writes
  std::string kernel;          // the generated one that computed it; "": the operator's own
  std::vector<NamedOp> fused;  // what that kernel computes
  double actual = 0;
  double expected = 0;
  double error = 0;      // the largest
  double tolerance = 0;  // of this value's elements
  int64_t wrong = 0;     // elements
  int64_t elements = 0;
};

struct Verified {
  size_t operators = 0;               // as recorded
  size_t steps = 0;                   // of the plan
  size_t kernels = 0;                 // steps that are generated kernels
  size_t values = 0;                  // that were compared
  std::vector<Mismatch> mismatches;   // in the order of the recording
  std::vector<std::string> problems;  // why values could not be compared
};

// As `run`, but step by step, with kernels, and never captured. Behind each step what it has made
// becomes what ATen made of the same inputs, so an error does not spread, and the plan ends as ATen
// would. Throws, before anything has changed, where an operator cannot be called on the CPU.
//
// What a step makes may differ from ATen's by a multiple of what ATen's own differs by from the
// same computation in float64, and of the rounding of its type.
Outcome verify(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
               std::span<const int64_t> values, Verified* verified);

}  // namespace acc::exec
