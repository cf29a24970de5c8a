#include "csrc/runtime/errors.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>

#include "csrc/base/check.h"
#include "csrc/runtime/hooks_table.h"

namespace acc::runtime {
namespace {

std::atomic<int32_t> injected{0};
std::atomic<int64_t> to_fail{0};

}  // namespace

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

std::string advice_after(int32_t cuda_error) {
  // By their names in driver_types.h; the host's build has no such header.
  constexpr std::array kLast{
      46,   // cudaErrorDevicesUnavailable
      214,  // cudaErrorECCUncorrectable
      220,  // cudaErrorNvlinkUncorrectable
      226,  // cudaErrorContained
      700,  // cudaErrorIllegalAddress
      702,  // cudaErrorLaunchTimeout
      709,  // cudaErrorContextIsDestroyed
      710,  // cudaErrorAssert
      714,  // cudaErrorHardwareStackError
      715,  // cudaErrorIllegalInstruction
      716,  // cudaErrorMisalignedAddress
      717,  // cudaErrorInvalidAddressSpace
      718,  // cudaErrorInvalidPc
      719,  // cudaErrorLaunchFailure
      999,  // cudaErrorUnknown
  };
  if (std::ranges::find(kLast, cuda_error) == kLast.end()) return "";
  return " The device is of no more use to this process: end it. nvidia-smi says whether the GPU "
         "is "
         "there, the kernel's log (dmesg, Xid) what happened to it; CUDA_LAUNCH_BLOCKING=1 with "
         "ACC_MODE=eager finds an operator that is to blame.";
}

void fail_waits(int32_t cuda_error, int64_t times) {
  injected.store(cuda_error);
  to_fail.store(cuda_error == 0 ? 0 : times);
}

void about_to_wait() {
  if (to_fail.load(std::memory_order_relaxed) <= 0 || to_fail.fetch_sub(1) <= 0) return;
  const int32_t code = injected.load();
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code,
                              base::concat("injected: CUDA error ", code, "."));
}

// What went wrong matters more than what could be said about it.
static std::string last_work_or_nothing(c10::DeviceIndex device) noexcept {
  try {
    return last_work(device);
  } catch (...) {
    return "";
  }
}

void rethrow_awaited(c10::DeviceIndex device, const c10::AcceleratorError& error) {
  const int32_t code = error.get_error_code();
  const std::string advice = advice_after(code);
  if (advice.empty()) throw;
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code,
                              base::concat(error.what_without_backtrace(),
                                           " This was heard of when acc:", static_cast<int>(device),
                                           " was waited for; any work before may be to blame.",
                                           last_work_or_nothing(device), advice));
}

void warn_once(const std::string& what) {
  static std::mutex mutex;
  static auto& told = *new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (what.empty() || !told.insert(what).second) return;
  }
  TORCH_WARN(what);
}

}  // namespace acc::runtime
