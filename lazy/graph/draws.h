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

}  // namespace acc::graph
