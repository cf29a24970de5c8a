#include "csrc/runtime/register.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <mutex>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/allocator.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/hooks.h"
#include "csrc/runtime/pinned.h"
#include "csrc/runtime/profiler.h"

namespace acc::runtime {

void register_runtime() {
  static std::once_flag once;
  std::call_once(once, [] {
    base::env::validate();
    // Who insists on CUDA is told at once, and again at each further import.
    if (base::env::executor() == base::env::Executor::Cuda) backend();
    const bool taken = c10::is_privateuse1_backend_registered();
    const std::string name = c10::get_privateuse1_backend();
    ACC_CHECK(!taken || name == "acc", "[acc] this process already has a device named '", name,
              "' in the one place that torch keeps for such devices. Do not import both; "
              "TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops torch from loading devices by itself.");
    c10::register_privateuse1_backend("acc");
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator());
    at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(&hooks());
    register_profiler();
    install_fork_handler();
  });
}

}  // namespace acc::runtime
