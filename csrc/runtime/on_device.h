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
  explicit OnDevice(c10::DeviceIndex index) : OnDevice(backend().default_stream(index)) {}
  // On another stream of an acc device.
  explicit OnDevice(c10::Stream stream) {
    const c10::DeviceType type = backend().alias_type();
    if (type == c10::kCPU) return;
    const c10::Device device(type, stream.device_index());
    guard_.reset_stream(c10::Stream(c10::Stream::UNSAFE, device, stream.id()));
  }

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace acc::runtime
