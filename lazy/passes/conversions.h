#pragma once

#include <cstdint>
#include <span>

#include "lazy/graph/graph.h"

// What passes add that give an operator its operands in another layout or type.
namespace acc::passes {

// Adds new memory of so many bytes, which the nodes of the program fill; returns its number.
uint32_t add_buffer(graph::Graph* out, uint64_t bytes);

// Adds a copy, by the operator `copy`, of the tensor with the words `from` to that with the words
// `to`. It counts as work of the node `by`.
void put_copy(graph::Graph* out, const graph::Op* copy, const graph::Node& by,
              std::span<const int64_t> to, std::span<const int64_t> from);

}  // namespace acc::passes
