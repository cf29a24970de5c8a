#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "lazy/graph/op.h"

// Operators as the recorder knows them, made from PyTorch's schemas and the op table.
namespace acc::aten {

// Whether calls of this overload are recorded: a pure function, an in-place or an out= overload on
// tensors that PyTorch neither decomposes nor treats as a view.
bool is_recordable(const c10::OperatorHandle& handle);

// The operator of `handle`, which lives until the process ends.
const graph::Op* make_op(const c10::OperatorHandle& handle);

// All operators made so far, by name, one line each with the roles of their arguments: what the
// test of the op table compares between torch versions.
std::vector<std::string> describe_ops();

}  // namespace acc::aten
