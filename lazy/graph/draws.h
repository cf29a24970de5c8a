#pragma once

#include <cstddef>

#include "lazy/graph/op.h"

namespace acc::graph {

// Whether the operator draws random numbers: its last two values say where.
inline bool draws_numbers(const Op& op) {
  const size_t n = op.arguments.size();
  return op.name.starts_with("acc::") && n >= 2 && op.arguments[n - 2].name == "seed" &&
         op.arguments[n - 1].name == "offset";
}

// Of these, whether a tensor of the call says it, too (kernels/library/attention.cpp): work that is
// captured reads it there, and can be submitted again for another place.
inline bool reads_philox_tensor(const Op& op) {
  return draws_numbers(op) && op.arguments.size() >= 3 &&
         op.arguments[op.arguments.size() - 3].name == "philox";
}

}  // namespace acc::graph
