#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <string>

// What caught exceptions say, and warnings that must not repeat.
namespace acc::runtime {

// Without the backtrace that PyTorch's errors carry.
std::string text_of(const std::exception_ptr& error);

// What to do after an error of CUDA's, by its number, after which the process gets nothing done on
// a GPU any more: the device is gone, or what ran on it went wrong. "" after others.
std::string advice_after(int32_t cuda_error);

// For tests: of what waits for a device, the next `times` fail with this number of CUDA's, as on a
// GPU that is lost; 0 ends it.
void fail_waits(int32_t cuda_error, int64_t times);

void about_to_wait();
// With what was submitted last to the device, and the advice.
[[noreturn]] void rethrow_awaited(c10::DeviceIndex device, const c10::AcceleratorError& error);

// Does what waits for work of a device, or reads what that made. What went wrong on a GPU in work
// that was submitted long before is heard of only here, from whoever waits first. The caller holds
// no mutex.
template <class Wait>
auto await_device(c10::DeviceIndex device, const Wait& wait) {
  try {
    about_to_wait();
    return wait();
  } catch (const c10::AcceleratorError& error) {
    rethrow_awaited(device, error);
  }
}

// Warns with `what` unless it was said before or is empty. Thread safe.
void warn_once(const std::string& what);

}  // namespace acc::runtime
