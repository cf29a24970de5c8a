#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// A matrix product that is only added to a tensor becomes one product that accumulates: mm and add_
// become addmm_, mm and add become addmm, likewise for batches. The product's own memory goes, and
// one pass over the sum: what backward does where a weight is used several times, and where
// gradients are accumulated over batches. float32 and float64 only: in half types the sum would be
// rounded elsewhere. Only where the product is added as it is: of a factor that is 0 at some step
// products that accumulate make nothing, and eager NaN where there are infinities.
//
// `outputs`: per buffer, whether the user can reach it at the end. Returns the graph without the
// additions, over the same buffers and values.
graph::Graph accumulate_products(const graph::Graph& graph, const std::vector<bool>& outputs);

}  // namespace acc::passes
