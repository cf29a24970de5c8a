#pragma once

#include <pybind11/pybind11.h>

// Memory of acc tensors for other libraries.
namespace acc::bindings {

void bind_dlpack(pybind11::module_& m);

}  // namespace acc::bindings
