#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <string>

// What the runtime asks of the part that records work. The session installs these functions, so
// that nothing in this folder includes anything lazy. With nothing installed there is no pending
// work.
namespace acc::runtime {

// Who asks for pending work to be submitted.
enum class Cause : uint8_t {
  kExplicit,  // synchronize(), empty_cache()
  kRead,      // memory statistics are read
  kEvent,     // an event or a stream is queried or waited for
};

struct FlushHooks {
  // Submits everything that is pending on a device; on all devices when it is negative. On the host
  // backend it is done on return, on CUDA it is in the stream. Throws what a failing operator
  // threw.
  void (*flush)(c10::DeviceIndex device, Cause cause) = nullptr;
  // Whether something recorded is not submitted yet; true as well while a flush is running.
  bool (*pending)(c10::DeviceIndex device) noexcept = nullptr;
  // The program is about to wait for the device. `flush` comes after it, where there is one.
  void (*note_wait)(c10::DeviceIndex device) = nullptr;
  // Resizes a storage of the acc device in program order.
  void (*resize_storage)(c10::StorageImpl& storage, size_t nbytes) = nullptr;
  // Frees memory that no tensor uses and that is kept only to be fast. Plans stay.
  void (*release_cached)(c10::DeviceIndex device) = nullptr;
  // What was submitted last, for people: a sentence behind a blank, or nothing.
  std::string (*last_work)(c10::DeviceIndex device) = nullptr;
};
void install_flush_hooks(const FlushHooks& hooks);

// The installed functions; each does nothing when none is installed, but `resize_storage` throws.
void flush(c10::DeviceIndex device, Cause cause);
bool pending(c10::DeviceIndex device) noexcept;
void note_wait(c10::DeviceIndex device);
void resize_storage(c10::StorageImpl& storage, size_t nbytes);
void release_cached(c10::DeviceIndex device);
std::string last_work(c10::DeviceIndex device);

}  // namespace acc::runtime
