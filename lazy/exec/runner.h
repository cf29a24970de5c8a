#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "lazy/plan/plan.h"

// Runs a plan, step by step, on the backend's device.
namespace acc::exec {

// The memory of a buffer that is given to a plan.
struct Given {
  c10::Storage memory;
  int64_t byte_offset = 0;
};

// How a run ended. `failed_step` is the number of steps when all went well; steps before it are
// complete, it and those after it did not run.
struct Outcome {
  std::vector<c10::Storage> outputs;  // per buffer; null where the plan keeps none
  size_t failed_step = 0;
  std::exception_ptr error;
};

// `given`: per buffer, empty for those the plan makes; taken apart while the run goes on, so that
// the last reference to an input dies after its last use. One run at a time per device.
Outcome run(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
            std::span<const int64_t> values);

// Frees the arena of a device. Nothing may be running on it.
void release_arena(c10::DeviceIndex device);

}  // namespace acc::exec
