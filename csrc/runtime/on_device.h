#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include "csrc/base/check.h"
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

// `second` goes on when `first` has come to this point.
inline void let_follow(c10::Stream first, c10::Stream second) {
  if (first == second) return;
  backend().block(*backend().mark(first, /*timing=*/false, nullptr), second);
}

// The stream that is current in this thread, which work of the device is about to wait for, or to
// be waited for by. Throws where the program captures a graph of its own there: CUDA would draw the
// work into that graph, or give up the capture.
inline c10::Stream open_current_stream(c10::DeviceIndex device) {
  const c10::Stream stream = backend().current_stream(device);
  ACC_CHECK(
      stream == backend().default_stream(device) || !backend().captured_by_program(stream),
      "[acc] the program captures a CUDA graph on its current stream, in which tensors of acc "
      "take no part: their work is on a stream of its own. Copy to and from CUDA tensors, and "
      "take addresses, before the capture begins, or capture the step with torchacc.capture.");
  return stream;
}
// Makes it wait for the default one: for those who are given an address and go on by themselves.
inline void let_current_stream_follow(c10::DeviceIndex device) {
  let_follow(backend().default_stream(device), open_current_stream(device));
}
// And the other way round.
inline void follow_current_stream(c10::DeviceIndex device) {
  let_follow(open_current_stream(device), backend().default_stream(device));
}

}  // namespace acc::runtime
