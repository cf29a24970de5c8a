#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lazy/graph/formula.h"
#include "lazy/graph/graph.h"
#include "lazy/passes/loops.h"

// A node that computes each element of its results from the operands' elements at its place, and
// from reductions of them.
namespace acc::passes {

struct Elementwise {
  const graph::Formula* formula = nullptr;
  uint8_t computed = 0;  // the type in which the formula computes
  uint8_t rounded = 0;   // the half type to which the result rounds before it is used; 0: none
  std::vector<int32_t> operands;      // per argument, its access; -1: no tensor, or not read
  std::vector<const int64_t*> items;  // per argument, its words
  std::vector<uint32_t> values;       // per argument, where its numbers begin in the value block
  int32_t position = -1;              // the access that counts along the second dimension
  int32_t index = -1;                 // the access that counts through all elements
  struct Result {
    uint32_t access;
    uint32_t term;
  };
  std::vector<Result> results;  // what it writes; the accesses are the last ones
  Nest nest;                    // over the result, or what is reduced
};

// Nothing for operators without a formula, and for operands that generated kernels do not know:
// complex and quantized types, lazy conjugation, arithmetic in 8 and 16 bit integers, results that
// overlap themselves, empty results, reductions of single elements.
std::optional<Elementwise> as_elementwise(const graph::Graph& graph, const graph::Node& node);

}  // namespace acc::passes
