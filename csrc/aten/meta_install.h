#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

#include "csrc/aten/meta_arguments.h"
#include "lazy/record/infer.h"

// How the Meta kernels of common operators are told to the recorder.
namespace acc::aten::meta {

inline bool any_arguments(Arguments) { return true; }

// All tensors have one real floating type, which the kernels work in without exception.
inline bool one_floating_type(Arguments arguments) {
  std::optional<at::ScalarType> type;
  for (const c10::IValue& argument : arguments) {
    const at::Tensor operand = tensor_or_none(argument);
    if (!operand.defined()) continue;
    const at::ScalarType other = operand.scalar_type();
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
