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

// Makes the stream that is current in this thread, where it is another, wait for the default one:
// for those who are given an address and go on by themselves.
inline void let_current_stream_follow(c10::DeviceIndex device) {
  Backend& known = backend();
  const c10::Stream work = known.default_stream(device);
  const c10::Stream current = known.current_stream(device);
  if (current != work) known.block(*known.mark(work, /*timing=*/false, nullptr), current);
}

}  // namespace acc::runtime
