#pragma once

#include <vector>

#include "lazy/plan/plan.h"

namespace acc::plan {

// Gives every buffer that the steps touch a place, and each step what it allocates and releases.
Schedule schedule(const Plan& plan, std::vector<Step> steps);

}  // namespace acc::plan
