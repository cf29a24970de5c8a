#include "csrc/runtime/hooks_table.h"

#include "csrc/base/check.h"

namespace acc::runtime {
namespace {

FlushHooks installed;

}  // namespace

void install_flush_hooks(const FlushHooks& hooks) { installed = hooks; }

void flush(c10::DeviceIndex device, Cause cause) {
  if (installed.flush != nullptr) installed.flush(device, cause);
}

bool pending(c10::DeviceIndex device) noexcept {
  return installed.pending != nullptr && installed.pending(device);
}

void note_wait(c10::DeviceIndex device) {
  if (installed.note_wait != nullptr) installed.note_wait(device);
}

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  ACC_CHECK(installed.resize_storage != nullptr);
  installed.resize_storage(storage, nbytes);
}

void release_cached(c10::DeviceIndex device) {
  if (installed.release_cached != nullptr) installed.release_cached(device);
}

std::string last_work(c10::DeviceIndex device) {
  return installed.last_work == nullptr ? "" : installed.last_work(device);
}

}  // namespace acc::runtime
