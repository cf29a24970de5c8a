#include "csrc/runtime/errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

namespace acc::runtime {

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

bool ends_the_device(int cuda_error) {
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
  return std::ranges::find(kLast, cuda_error) != kLast.end();
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
