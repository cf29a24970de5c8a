#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// Running an operator at once, on the alias tensors of the backend's device.
namespace acc::aten {

// Submits what is pending, runs `handle` on aliases of its acc arguments and wraps the results. The
// way of custom operators, of operators whose result depends on data, and of ACC_MODE=eager. Raises
// what the operator raises.
void run_now(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

// The boxed fallback of the device: counts the operator, then runs it now.
void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
              torch::jit::Stack* stack);

// A new acc tensor that takes over the memory of `result`, a tensor of the backend's device.
at::Tensor wrap(const at::Tensor& result, c10::DeviceIndex device);

}  // namespace acc::aten
