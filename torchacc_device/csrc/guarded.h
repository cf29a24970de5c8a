#pragma once

#include <torch/csrc/Exceptions.h>

#include <utility>

// Functions for Python with torch's translation of errors and warnings, with the interpreter lock
// or without.
namespace acc::bindings {

template <class Function>
auto guarded(Function function) {
  return torch::wrap_pybind_function(std::move(function));
}

template <class Function>
auto unlocked(Function function) {
  return torch::wrap_pybind_function_no_gil(std::move(function));
}

}  // namespace acc::bindings
