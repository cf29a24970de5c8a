#include "csrc/runtime/exhaustion.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <limits>
#include <new>
#include <string_view>

namespace acc::runtime {
namespace {

std::atomic<int64_t> counted{0};
std::atomic<int64_t> first_to_fail{std::numeric_limits<int64_t>::max()};
std::atomic<int64_t> first_to_succeed{std::numeric_limits<int64_t>::max()};
std::atomic<bool> device_lost{false};
// Until a test asks for failures nothing is counted.
std::atomic<size_t> smallest{std::numeric_limits<size_t>::max()};

}  // namespace

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::Error& other) {
    return std::string_view(other.what_without_backtrace()).find("can't allocate memory") !=
           std::string_view::npos;
  } catch (...) {
    return false;
  }
}

void about_to_allocate(size_t nbytes) {
  if (nbytes < smallest.load(std::memory_order_relaxed)) return;
  const int64_t number = counted.fetch_add(1, std::memory_order_relaxed);
  if (number < first_to_fail.load() || number >= first_to_succeed.load()) return;
  if (device_lost.load()) {
    constexpr int32_t kUnspecifiedLaunchFailure = 719;
    throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                kUnspecifiedLaunchFailure,
                                "injected: CUDA error: unspecified launch failure");
  }
  TORCH_CHECK(false, "injected: can't allocate memory: you tried to allocate ", nbytes, " bytes.");
}

void fail_allocations(int64_t after, int64_t times, size_t at_least, bool lost) {
  first_to_fail.store(std::numeric_limits<int64_t>::max());
  device_lost.store(lost);
  smallest.store(at_least);
  counted.store(0);
  first_to_succeed.store(after + times);
  if (times > 0) first_to_fail.store(after);
}

int64_t allocations_counted() { return counted.load(); }

}  // namespace acc::runtime
