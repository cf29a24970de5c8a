#pragma once

#include <pybind11/pybind11.h>

// Batches of data for a device.
namespace acc::bindings {

void bind_batches(pybind11::module_& m);

}  // namespace acc::bindings
