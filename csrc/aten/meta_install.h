#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "lazy/record/infer.h"

// How the Meta kernels of common operators are told to the recorder.
namespace acc::aten::meta {

using Arguments = c10::ArrayRef<c10::IValue>;

inline bool any_arguments(Arguments) { return true; }

// All tensors have one real floating type, which the kernels work in without exception.
inline bool one_floating_type(Arguments arguments) {
  std::optional<at::ScalarType> type;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::ScalarType other = argument.toTensor().scalar_type();
    if (!at::isFloatingType(other) || type.value_or(other) != other) return false;
    type = other;
  }
  return true;
}

// `function`: a pointer, so that one wrapper serves all of one signature.
template <class Result, class... Parameters>
void install(const char* name, Result (*function)(Parameters...),
             bool (*applies)(Arguments arguments) = &any_arguments) {
  record::install_meta_kernel(
      name, {c10::KernelFunction::makeFromUnboxedRuntimeFunction(function), applies});
}

// Operators whose kernels are not structured, or not alike on all devices.
void register_unstructured();

}  // namespace acc::aten::meta
