#include "csrc/runtime/profiler.h"

#include <torch/csrc/profiler/stubs/base.h>

#include <chrono>
#include <functional>
#include <memory>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"

namespace acc::runtime {
namespace {

using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::ProfilerVoidEventStub;

// Times of the device for the profiler that was asked for them by use_device="acc". Recording takes
// no time there, so an operator's time is that of what the call submitted.
class Stubs : public ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event,
              int64_t* cpu_ns) const override {
    const c10::DeviceIndex current = backend().current_device();
    if (device != nullptr) *device = current;
    *event = std::shared_ptr<Marker>(
        backend().mark(backend().current_stream(current), /*timing=*/true, nullptr));
    if (cpu_ns != nullptr) {
      *cpu_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count();
    }
  }

  // In microseconds.
  float elapsed(const ProfilerVoidEventStub* from, const ProfilerVoidEventStub* to) const override {
    constexpr double kPerMillisecond = 1000;
    const auto& begin = *static_cast<const Marker*>(from->get());
    const auto& end = *static_cast<const Marker*>(to->get());
    // The profiler's own wait, for each operator when it is read: `note_wait`, which tells of lines
    // where the program waits, is not told.
    backend().wait(end);
    return static_cast<float>(kPerMillisecond * backend().elapsed_ms(begin, end));
  }

  // Tools that draw ranges of their own (nvtx) have hooks of their own.
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}

  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    for (int i = 0; i < backend().device_count(); ++i) op(i);
  }
  void synchronize() const override { runtime::synchronize(-1); }
};

}  // namespace

void register_profiler() {
  // Never destroyed: profilers may end after static destructors have begun.
  torch::profiler::impl::registerPrivateUse1Methods(new Stubs);
}

}  // namespace acc::runtime
