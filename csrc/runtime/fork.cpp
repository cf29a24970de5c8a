#include "csrc/runtime/fork.h"

#include <pthread.h>

#include <mutex>

#include "csrc/base/check.h"

namespace acc::runtime {
namespace detail {

std::atomic<bool> device_used{false};
std::atomic<bool> driver_started{false};
std::atomic<bool> forked_after_use{false};

}  // namespace detail

namespace {

void in_child() {
  if (was_used() || detail::driver_started.load(std::memory_order_relaxed)) {
    detail::forked_after_use.store(true, std::memory_order_relaxed);
  }
}

}  // namespace

void install_fork_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int error = pthread_atfork(nullptr, nullptr, &in_child);
    ACC_CHECK(error == 0, "[torch.acc] pthread_atfork failed with error ", error,
              ". Free some memory and start again.");
  });
}

void note_use() {
  if (in_bad_fork()) [[unlikely]] {
    ACC_FAIL(
        "[torch.acc] cannot use the acc device in a process that was forked after its parent had "
        "used it",
        was_used() ? "" : ", or had only asked for GPUs",
        ". Start the process with the 'spawn' method, or keep acc tensors out of it.");
  }
  // A store for each new storage would make threads fight for the cache line.
  if (!was_used()) detail::device_used.store(true, std::memory_order_relaxed);
}

}  // namespace acc::runtime
