#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace acc::runtime {

// What torch's device-generic code asks of the device beyond the guard: availability, the current
// device, generators, pinned memory, storage resizes.
at::PrivateUse1HooksInterface& hooks();

}  // namespace acc::runtime
