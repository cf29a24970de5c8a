#pragma once

#include <string>
#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/passes/fuse.h"
#include "lazy/plan/plan.h"

// What passes make of a graph, in the text form of lazy/graph/print.h: what ACC_DUMP=passes prints.
namespace acc::plan {

// The nodes that stay.
std::string print(const graph::Graph& graph, const std::vector<bool>& stays);

// The clusters in order; those of several nodes in braces, as "loops 0 {".
std::string print(const graph::Graph& graph, const std::vector<passes::Cluster>& clusters);

// The steps in order; those of a kernel in braces, under its number in the plan.
std::string print(const graph::Graph& graph, const std::vector<Step>& steps);

}  // namespace acc::plan
