#pragma once

#include <pybind11/pybind11.h>

namespace acc::bindings {

// Adds the functions behind torchacc.explain, torchacc.strict, torchacc.verify and torchacc.eager.
void bind_debugging(pybind11::module_& m);

}  // namespace acc::bindings
