#include "csrc/runtime/backend.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"
#include "csrc/runtime/nvidia.h"

namespace acc::runtime {
namespace {

using base::env::Executor;

std::atomic<Backend*> chosen{nullptr};  // and set up

// While it is held no interpreter lock is taken, so that waiting for it while holding one is
// harmless. What is set up asks for the choice itself.
std::recursive_mutex choice_mutex;
Backend* choice = nullptr;
std::vector<void (*)()> waiting_for_choice;

Backend& choose() {
  const Executor executor = base::env::executor();
  if (executor == Executor::Host) return host_backend();
  // The probe asks CUDA itself: torch's device_count would add a warning of its own.
  const GpuProbe probe = probe_gpu();
  Backend* cuda = cuda_backend();
  const std::optional<std::string> problem = unusable_gpu(probe);
  if (cuda != nullptr && probe.devices > 0 && !problem) {
    note_driver();
    if (const auto beside = unusable_beside(probe)) {
      TORCH_WARN("[acc] not all GPUs of this machine can be used: ", *beside);
    }
    return *cuda;
  }
  if (executor == Executor::Cuda) {
    ACC_FAIL("[ACC_EXECUTOR=cuda] there is no usable NVIDIA GPU: ",
             problem.value_or("CUDA sees no device. Either no NVIDIA driver is loaded, or "
                              "CUDA_VISIBLE_DEVICES hides all."),
             " Unset ACC_EXECUTOR to use the host executor.");
  }
  if (problem) {
    TORCH_WARN("[acc] this machine has an NVIDIA GPU that cannot be used: ", *problem,
               " Tensors on acc run on the CPU until then (ACC_EXECUTOR=host silences this).");
  }
  return host_backend();
}

}  // namespace

Backend& backend() {
  if (Backend* known = chosen.load(std::memory_order_acquire)) [[likely]]
    return *known;
  const std::lock_guard lock(choice_mutex);
  if (choice != nullptr) return *choice;
  choice = &choose();
  for (const auto then : waiting_for_choice) then();
  waiting_for_choice.clear();
  chosen.store(choice, std::memory_order_release);
  return *choice;
}

void when_chosen(void (*then)()) {
  const std::lock_guard lock(choice_mutex);
  if (choice != nullptr) return then();
  waiting_for_choice.push_back(then);
}

Backend* chosen_backend() noexcept { return chosen.load(std::memory_order_acquire); }

void check_device(c10::DeviceIndex device) {
  const c10::DeviceIndex count = backend().device_count();
  ACC_CHECK(device >= 0 && device < count,
            "[torch.acc] there is no device acc:", static_cast<int>(device), ": this process has ",
            static_cast<int>(count), " (executor ", backend().name(), "). ",
            on_host() ? "ACC_HOST_DEVICES sets how many devices the host executor presents."
                      : "CUDA_VISIBLE_DEVICES says which GPUs are seen.");
}

void synchronize(c10::DeviceIndex device) {
  note_use();
  if (device < 0) device = backend().current_device();
  check_device(device);
  note_wait(device);
  flush(device, Cause::kExplicit);
  const GilRelease release;
  await_device(device, [&] { backend().synchronize(device); });
}

}  // namespace acc::runtime
