#pragma once

#include <pybind11/pybind11.h>

namespace acc::bindings {

// Adds the functions behind torch.acc to the extension: devices, streams, memory, generators.
// Every function that may wait releases the interpreter lock.
void bind_runtime(pybind11::module_& m);

}  // namespace acc::bindings
