#pragma once

#include <vector>

#include "lazy/plan/plan.h"

namespace acc::plan {

// Steps in an order that needs less memory at its peak, where one is near: the same order where
// none is. What depends on another step stays behind it, and what may not be left out (collectives,
// assertions) keeps its place among its like.
//
// Programs make and free memory in an order that is nearly the best. What is worth a change are
// neighbours: of the two products in the backward of a linear layer, the one first whose operand
// nobody needs after it.
std::vector<Step> order_steps(const Plan& plan, std::vector<Step> steps);

}  // namespace acc::plan
