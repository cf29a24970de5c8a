#pragma once

#include <cstdint>

#include "lazy/plan/plan.h"

namespace acc::plan {

// Whether a step may write `made`, which it makes, over `read`, which nobody needs after it: each
// element of the one is computed from the element of the other that lies at the same place, and
// from no other of it. The two have equally many bytes.
bool may_overwrite(const Plan& plan, const Step& step, uint32_t made, uint32_t read);

}  // namespace acc::plan
