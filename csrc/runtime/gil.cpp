#include "csrc/runtime/gil.h"

#include <pthread.h>

#include <atomic>
#include <ctime>

namespace acc::runtime {
namespace {

// How often a thread that waits for a mutex looks whether the user has asked to stop.
constexpr long kPollNs = 50'000'000;

Gil interpreter;
// The main thread waits for a mutex, and Ctrl-C came.
std::atomic<bool> main_is_kept{false};

// As of a std::timed_mutex, whose call the thread sanitizer of g++ 13 and older does not know.
bool lock_in_time(std::mutex& mutex) {
  constexpr long kSecondNs = 1'000'000'000;
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += kPollNs;
  until.tv_sec += until.tv_nsec / kSecondNs;
  until.tv_nsec %= kSecondNs;
  return pthread_mutex_timedlock(mutex.native_handle(), &until) == 0;
}

bool told() { return interpreter.interrupted != nullptr && interpreter.interrupted(); }

void* release_if_held() {
  return interpreter.held != nullptr && interpreter.held() ? interpreter.release() : nullptr;
}

}  // namespace

void install_gil(const Gil& gil) { interpreter = gil; }

bool is_interrupt(const std::exception& error) {
  return interpreter.is_interrupt != nullptr && interpreter.is_interrupt(error);
}

bool add_note(const std::exception& error, const std::string& note) {
  return interpreter.add_note != nullptr && interpreter.add_note(error, note);
}

bool interrupted() { return main_is_kept.load(std::memory_order_relaxed) || told(); }

void handle_signals() {
  if (interpreter.handle_signals != nullptr) interpreter.handle_signals();
}

GilRelease::GilRelease() : token_(release_if_held()) {}

GilRelease::~GilRelease() {
  if (token_ != nullptr) interpreter.acquire(token_);
}

GilHold::GilHold() : token_(interpreter.hold != nullptr ? interpreter.hold() : nullptr) {}

GilHold::~GilHold() {
  if (token_ != nullptr) interpreter.let_go(token_);
}

LockWithoutGil::LockWithoutGil(std::mutex& mutex) : mutex_(mutex) {
  if (mutex_.try_lock()) return;
  token_ = release_if_held();
  while (!lock_in_time(mutex_)) {
    if (!kept_ && told()) main_is_kept = kept_ = true;
  }
  if (kept_) main_is_kept = false;
}

LockWithoutGil::~LockWithoutGil() {
  mutex_.unlock();
  if (token_ != nullptr) interpreter.acquire(token_);
}

}  // namespace acc::runtime
