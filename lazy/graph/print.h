#pragma once

#include <cstdint>
#include <string>

#include "lazy/graph/graph.h"

namespace acc::graph {

// One line per node: results, operator, operands with geometry, structural arguments ("_" for
// numbers that change from run to run). The format of golden tests.
std::string print(const Graph& graph);

// The line of one node, without the end of line.
std::string print(const Graph& graph, const Node& node);

// One argument or result, by its tag word.
std::string print(const int64_t* word);

}  // namespace acc::graph
