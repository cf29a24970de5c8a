#pragma once

#include <pybind11/pybind11.h>

namespace acc::bindings {

// Adds the class behind torchacc.capture to the extension.
void bind_capture(pybind11::module_& m);

}  // namespace acc::bindings
