#include "kernels/device/device_kernels.h"

#include <atomic>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "kernels/device/cuda_kernels.h"

namespace acc::device {
namespace {

std::atomic<const DeviceKernels*> instead{nullptr};

}  // namespace

const DeviceKernels* device_kernels(c10::DeviceIndex device) {
  if (runtime::backend().alias_type() != c10::kCPU) return cuda_kernels(device);
  return instead.load(std::memory_order_acquire);
}

bool are_of_gpus() {
  return runtime::backend().alias_type() != c10::kCPU ||
         instead.load(std::memory_order_acquire) != nullptr;
}

void use_device_kernels(const DeviceKernels* kernels) {
  ACC_CHECK(runtime::backend().alias_type() == c10::kCPU,
            "[torch.acc] kernels can be emulated on the host only, and this process uses a GPU. "
            "Set ACC_EXECUTOR=host.");
  instead.store(kernels, std::memory_order_release);
}

}  // namespace acc::device
