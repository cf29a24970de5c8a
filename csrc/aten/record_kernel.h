#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "lazy/graph/op.h"

namespace acc::aten {

// Records the call, or runs it now where it cannot be recorded or ACC_MODE says so.
void record_or_run(const graph::Op& op, const c10::OperatorHandle& handle,
                   torch::jit::Stack* stack);

// Whether this thread's operators run at once from now on, as in ACC_MODE=eager. Returns what was.
bool run_eagerly(bool on);

// Whether this thread's operators are not recorded, but run one by one.
bool runs_at_once();

// Registers the recorder for every recordable operator of `aten` and of our own library `acc`.
// Called once, after the device is registered.
void register_recorded_ops();

// What operators without a kernel of their own do, for each dispatch key of the device.
void register_fallbacks();

}  // namespace acc::aten
