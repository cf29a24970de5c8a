#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "csrc/runtime/backend.h"

// What the rules of Meta kernels ask about the arguments of a call.
namespace acc::aten {

using Arguments = c10::ArrayRef<c10::IValue>;

using runtime::on_host;

inline const at::Tensor& tensor(const c10::IValue& value) { return value.toTensor(); }

inline at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// Whether the floating-point operands are of one type. For operators that promote nothing: what
// their Meta kernels say of two types is not what eager does.
inline bool one_type(Arguments arguments) {
  std::optional<c10::ScalarType> met;
  for (const c10::IValue& value : arguments) {
    const at::Tensor operand = tensor_or_none(value);
    if (!operand.defined() || !operand.is_floating_point()) continue;
    if (operand.scalar_type() != met.value_or(operand.scalar_type())) return false;
    met = operand.scalar_type();
  }
  return true;
}

// A dimension that may be counted from the end.
inline int64_t wrapped(const c10::IValue& dim, const at::Tensor& self) {
  return dim.toInt() + (dim.toInt() < 0 ? self.dim() : 0);
}

}  // namespace acc::aten
