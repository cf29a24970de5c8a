#include "csrc/runtime/allocator.h"

#include "csrc/base/check.h"
#include "csrc/runtime/address_space.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/hooks_table.h"

namespace acc::runtime {
namespace {

void keep(void*) {}

class ReservingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    // The context equals the data, so that raw_allocate works.
    void* address = reserve(nbytes);
    return {address, address, &keep, acc_device(backend().current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &keep; }

  // Called by copy-on-write and Allocator::clone, which see addresses only.
  void copy_data(void*, const void*, size_t nbytes) const override {
    ACC_FAIL("[acc] torch tried to copy ", nbytes,
             " bytes of a storage behind the dispatcher's back (copy-on-write, or a clone of the "
             "allocation). Use tensor.clone() instead.");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    note_use();
    for (c10::DeviceIndex i = 0; i < backend().device_count(); ++i) release_cached(i);
    backend().empty_cache();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (memory.get() == nullptr || reserved(memory.get())) return;
    backend().record_stream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    settle(device);
    return backend().memory_stats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    settle(device);
    backend().reset_accumulated_memory(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    settle(device);
    backend().reset_peak_memory(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    settle(device);
    return backend().memory_info(device);
  }

 private:
  static void settle(c10::DeviceIndex device) {
    note_use();
    check_device(device);
    flush(device, Cause::kRead);
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  // Never destroyed: storages may outlive static destructors.
  static c10::DeviceAllocator& instance = *new ReservingAllocator;
  return instance;
}

}  // namespace acc::runtime
