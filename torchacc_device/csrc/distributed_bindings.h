#pragma once

#include <pybind11/pybind11.h>

namespace acc::bindings {

// Adds the class ProcessGroupACC. Needs torch.distributed, whose classes it derives from: does
// nothing, and returns false, in a torch that was built without.
bool bind_distributed(pybind11::module_& m);

}  // namespace acc::bindings
