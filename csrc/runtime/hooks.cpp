#include "csrc/runtime/hooks.h"

#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/generator.h"
#include "csrc/runtime/hooks_table.h"
#include "csrc/runtime/pinned.h"

namespace acc::runtime {
namespace {

using c10::DeviceIndex;

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {
    note_use();
    backend();
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasPrimaryContext(DeviceIndex device) const override {
    const Backend* known = chosen_backend();
    return known != nullptr && known->has_context(device);
  }

  // Zero stands for every kind of trouble, as in the guard.
  DeviceIndex deviceCount() const override {
    try {
      return backend().device_count();
    } catch (const std::exception&) {
      return 0;
    }
  }
  void setCurrentDevice(DeviceIndex device) const override {
    check_device(device);
    backend().exchange_device(device);
  }
  DeviceIndex getCurrentDevice() const override { return backend().current_device(); }
  // A negative index stands for "leave it" and is what comes back, as in torch.cuda.
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return device < 0 ? DeviceIndex{-1} : backend().exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator(device);
  }

  at::Device getDeviceFromPtr(void* address) const override {
    return acc_device(backend().device_of(address));
  }
  bool isPinnedPtr(const void* address) const override { return backend().is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    note_use();
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace

at::PrivateUse1HooksInterface& hooks() {
  // Never destroyed: torch keeps the pointer.
  static at::PrivateUse1HooksInterface& instance = *new Hooks;
  return instance;
}

}  // namespace acc::runtime
