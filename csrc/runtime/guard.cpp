#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/event.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"

// How torch's device-generic code (guards, streams, events, the autograd engine) drives the device.
namespace acc::runtime {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

DeviceIndex or_current(Device device) {
  return device.has_index() ? device.index() : backend().current_device();
}

Event& event_of(void* event) {
  ACC_CHECK(event != nullptr);
  return *static_cast<Event*>(event);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  DeviceIndex deviceCount() const noexcept override {
    // Zero stands for every kind of trouble; who uses the device is told which.
    try {
      return backend().device_count();
    } catch (const std::exception&) {
      return 0;
    }
  }

  Device exchangeDevice(Device device) const override {
    return acc_device(backend().exchange_device(device.index()));
  }
  Device getDevice() const override { return acc_device(backend().current_device()); }
  void setDevice(Device device) const override { backend().exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (Backend* known = chosen_backend()) known->unchecked_set_device(device.index());
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override {
    return backend().current_stream(or_current(device));
  }
  Stream getDefaultStream(Device device) const override {
    return backend().default_stream(or_current(device));
  }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  Stream getNewStream(Device device, int priority) const override {
    note_use();
    return backend().new_stream(or_current(device), priority);
  }
  Stream exchangeStream(Stream stream) const override { return backend().exchange_stream(stream); }
  void* getStreamNativeHandle(const Stream stream) const override {
    return backend().native_stream(stream);
  }
  bool queryStream(const Stream& stream) const override {
    note_use();
    flush(stream.device_index(), Cause::kEvent);
    return await_device(stream.device_index(), [&] {
      return backend().query_stream(stream) && backend().query_stream(work_stream(stream));
    });
  }
  void synchronizeStream(const Stream& stream) const override {
    note_use();
    note_wait(stream.device_index());
    flush(stream.device_index(), Cause::kEvent);
    const GilRelease release;
    await_device(stream.device_index(), [&] {
      backend().synchronize_stream(stream);
      backend().synchronize_stream(work_stream(stream));
    });
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag flag) const override {
    // Timing is asked for with BACKEND_DEFAULT, as in torch's other backends.
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    event_of(*event).record(stream);
  }
  void block(void* event, const Stream& stream) const override { event_of(event).block(stream); }
  bool queryEvent(void* event) const override { return event_of(event).query(); }
  void synchronizeEvent(void* event) const override { event_of(event).synchronize(); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return event_of(from).elapsed_ms(event_of(to));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->recordStream(memory, stream);
  }

 private:
  // Recorded work runs on the default stream, whatever stream was current when it was recorded.
  static Stream work_stream(const Stream& stream) {
    return backend().default_stream(stream.device_index());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace acc::runtime
