#pragma once

#include <atomic>

// A process that was forked after its parent had used the device has neither the parent's threads
// nor its GPU context: every use of the device there is an error.
namespace acc::runtime {

namespace detail {
extern std::atomic<bool> device_used;
extern std::atomic<bool> driver_started;
extern std::atomic<bool> forked_after_use;
}  // namespace detail

// Notices forks from now on. Idempotent.
void install_fork_handler();

// Whether this process may not use the device because it was forked too late.
inline bool in_bad_fork() noexcept {
  return detail::forked_after_use.load(std::memory_order_relaxed);
}

// Whether the device was used in this process (or, in a bad fork, in its parent).
inline bool was_used() noexcept { return detail::device_used.load(std::memory_order_relaxed); }

// NVIDIA's driver was started, for a GPU that is to be used: it does not survive a fork.
inline void note_driver() noexcept {
  detail::driver_started.store(true, std::memory_order_relaxed);
}

// Throws in a bad fork, otherwise notes that the device is in use.
void note_use();

}  // namespace acc::runtime
