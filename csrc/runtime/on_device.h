#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include "csrc/runtime/backend.h"

namespace acc::runtime {

// Work of an acc device goes to its default stream, and memory comes from it, whatever device and
// stream the submitting thread has chosen. On the host there is nothing to choose.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex index) {
    const c10::DeviceType type = backend().alias_type();
    if (type == c10::kCPU) return;
    guard_.reset_stream(c10::Stream(c10::Stream::DEFAULT, c10::Device(type, index)));
  }

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace acc::runtime
