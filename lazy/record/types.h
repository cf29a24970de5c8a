#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lazy/graph/op.h"

// Which types of operands a kernel takes. Meta kernels promise results for types that the backend's
// kernels refuse, and a wrong type has to be told at its line.
namespace acc::record {

// Whether the call's kernel takes its types. An operator is asked once for each combination that is
// not all float32 or all float64: its kernel is called with operands of the call's geometry that
// nobody keeps, ones and, for integers, zeros. What is random, part of a backward or not PyTorch's,
// and what takes integers beside other types without being pointwise is believed without being
// asked. The answer to a call without elements holds for that one only. A call is doubted that is
// refused, since the kernel may have disliked the values, or that would take more than 16 MiB to
// ask. `signature` as for `infer`; the caller holds no lock.
bool takes_types(std::span<const int64_t> signature, const graph::Op& op,
                 const c10::OperatorHandle& handle, c10::ArrayRef<c10::IValue> arguments,
                 uint64_t result_bytes);

// The operator and types that this thread's last call was doubted for; empty: it was not.
using Doubt = std::vector<int64_t>;
Doubt take_doubt();

// The call ran after all: from now on they are believed.
void dismiss(const Doubt& doubt);

}  // namespace acc::record
