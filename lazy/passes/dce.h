#pragma once

#include <vector>

#include "lazy/graph/graph.h"

namespace acc::passes {

// Dead code elimination. A node stays when it may not be removed, or when it writes a buffer that a
// later node reads or that is alive at the end. Liveness goes by storage: a write through one view
// keeps what is read through another.
//
// `alive` says per buffer whether the user can still reach it; inputs count as alive when they are
// written. Returns per node whether it stays.
std::vector<bool> eliminate_dead_code(const graph::Graph& graph, const std::vector<bool>& alive);

}  // namespace acc::passes
