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
std::atomic<Failure> failure{Failure::kNoMemory};
std::atomic<int64_t> captures_to_fail{0};
std::atomic<int64_t> submissions_to_fail{0};
// Until a test asks for failures nothing is counted.
std::atomic<size_t> smallest{std::numeric_limits<size_t>::max()};

// CUDA's numbers.
constexpr int32_t kMemoryAllocation = 2;
constexpr int32_t kUnspecifiedLaunchFailure = 719;

[[noreturn]] void throw_cuda_error(int32_t number, const char* text) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, number, text);
}

void fail_one_of(std::atomic<int64_t>& left) {
  if (left.load(std::memory_order_relaxed) == 0) return;
  left.fetch_sub(1);
  throw_cuda_error(kMemoryAllocation, "injected: CUDA error: out of memory");
}

}  // namespace

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::AcceleratorError& other) {
    return other.get_error_code() == kMemoryAllocation;
  } catch (const c10::Error& other) {
    const std::string_view text = other.what_without_backtrace();
    // PyTorch's allocator of the CPU; cuBLAS, cuDNN, cuSOLVER and cuSPARSE.
    return text.find("can't allocate memory") != text.npos ||
           text.find("_STATUS_ALLOC_FAILED") != text.npos;
  } catch (...) {
    return false;
  }
}

void about_to_allocate(size_t nbytes) {
  if (nbytes < smallest.load(std::memory_order_relaxed)) return;
  const int64_t number = counted.fetch_add(1, std::memory_order_relaxed);
  if (number < first_to_fail.load() || number >= first_to_succeed.load()) return;
  switch (failure.load()) {
    case Failure::kLost:
      throw_cuda_error(kUnspecifiedLaunchFailure,
                       "injected: CUDA error: unspecified launch failure");
    case Failure::kCuda:
      throw_cuda_error(kMemoryAllocation, "injected: CUDA error: out of memory");
    case Failure::kCublas:
      TORCH_CHECK(false, "injected: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`");
    case Failure::kNoMemory:
      TORCH_CHECK(false, "injected: can't allocate memory: you tried to allocate ", nbytes,
                  " bytes.");
  }
}

void about_to_capture() { fail_one_of(captures_to_fail); }
void about_to_submit() { fail_one_of(submissions_to_fail); }

void fail_captured_work(int64_t captures, int64_t submissions) {
  captures_to_fail.store(captures);
  submissions_to_fail.store(submissions);
}

void fail_allocations(int64_t after, int64_t times, size_t at_least, Failure as) {
  first_to_fail.store(std::numeric_limits<int64_t>::max());
  failure.store(as);
  smallest.store(at_least);
  counted.store(0);
  first_to_succeed.store(after + times);
  if (times > 0) first_to_fail.store(after);
}

int64_t allocations_counted() { return counted.load(); }

}  // namespace acc::runtime
