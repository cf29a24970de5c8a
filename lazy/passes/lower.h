#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codegen/kernel_spec.h"
#include "lazy/graph/graph.h"
#include "lazy/passes/fuse.h"

namespace acc::passes {

// A number that a launch passes.
struct Number {
  bool immediate = false;
  int64_t bits = 0;  // the number, or where it stands in the step's value block

  bool operator==(const Number&) const = default;
};

// One call of a kernel: everything that its text does not say.
struct Launch {
  struct Operand {
    uint32_t buffer = 0;
    int64_t byte_offset = 0;
    bool stored = false;
    bool operator==(const Operand&) const = default;
  };
  std::vector<Operand> operands;
  std::vector<int64_t> geometry;  // see codegen::HostFunction
  std::vector<Number> numbers;
  int64_t elements = 0;  // of the kept loops
  int64_t turns = 1;     // of the reduced loops, for each of those

  bool operator==(const Launch&) const = default;
};

struct Lowered {
  codegen::KernelSpec kernel;
  Launch launch;
};

// The kernel of a cluster of nodes with formulas. `stored`: per buffer, whether somebody outside
// the cluster sees what it writes there; where nobody does, it stays in registers, in float32 where
// its type is a half. `alike`: rounded then, too, so that who sees it changes no other value.
Lowered lower(const graph::Graph& graph, const Cluster& cluster, const std::vector<bool>& stored,
              bool alike);

}  // namespace acc::passes
