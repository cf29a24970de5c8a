#pragma once

#include "lazy/graph/graph.h"

namespace acc::passes {

// On hosts products of float16, and of bfloat16 where the processor does not multiply it, compute
// in float32: their operands are converted before, and what they make is rounded to the half type
// behind them. ATen's own kernels take 30 to 70 times as long as those for float32
// (docs/mixed-precision.md).
//
// Returns the nodes over the same values, and the same buffers with those of the conversions added
// behind them. An operand that several products read is converted once.
graph::Graph widen_products(const graph::Graph& graph);

}  // namespace acc::passes
