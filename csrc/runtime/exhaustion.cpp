#include "csrc/runtime/exhaustion.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <new>
#include <string_view>

namespace acc::runtime {
namespace {

std::atomic<int64_t> counted{0};
std::atomic<int64_t> first_to_fail{std::numeric_limits<int64_t>::max()};
std::atomic<int64_t> first_to_succeed{std::numeric_limits<int64_t>::max()};
std::atomic<size_t> smallest{0};

// Memory comes from, and goes back to, the allocator behind it.
class FailingAllocator final : public c10::Allocator {
 public:
  explicit FailingAllocator(c10::Allocator* real) : real_(*real) {}

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes < smallest.load()) return real_.allocate(nbytes);
    const int64_t number = counted.fetch_add(1);
    if (number >= first_to_fail.load() && number < first_to_succeed.load()) {
      TORCH_CHECK(false, "injected: can't allocate memory: you tried to allocate ", nbytes,
                  " bytes.");
    }
    return real_.allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    real_.copy_data(to, from, nbytes);
  }

 private:
  c10::Allocator& real_;
};

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    constexpr uint8_t kHighest = std::numeric_limits<uint8_t>::max();
    c10::SetCPUAllocator(new FailingAllocator(c10::GetCPUAllocator()), kHighest);
  });
}

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

void fail_allocations(int64_t after, int64_t times, size_t at_least) {
  install();
  first_to_fail.store(std::numeric_limits<int64_t>::max());
  smallest.store(at_least);
  counted.store(0);
  first_to_succeed.store(after + times);
  if (times > 0) first_to_fail.store(after);
}

int64_t allocations_counted() { return counted.load(); }

}  // namespace acc::runtime
