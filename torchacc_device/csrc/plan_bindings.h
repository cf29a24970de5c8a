#pragma once

#include <pybind11/pybind11.h>

namespace acc::bindings {

// Adds the functions behind torchacc.graph to the extension: the plan that ran last as plain values
// (torchacc/graph_view/plan.py documents them), and the switch for the time of its steps.
void bind_plans(pybind11::module_& m);

}  // namespace acc::bindings
