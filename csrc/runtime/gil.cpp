#include "csrc/runtime/gil.h"

namespace acc::runtime {
namespace {

Gil installed;

void* release_if_held() {
  return installed.held != nullptr && installed.held() ? installed.release() : nullptr;
}

}  // namespace

void install_gil(const Gil& gil) { installed = gil; }

bool is_interrupt(const std::exception& error) {
  return installed.is_interrupt != nullptr && installed.is_interrupt(error);
}

bool interrupted() { return installed.interrupted != nullptr && installed.interrupted(); }

GilRelease::GilRelease() : token_(release_if_held()) {}

GilRelease::~GilRelease() {
  if (token_ != nullptr) installed.acquire(token_);
}

GilHold::GilHold() : token_(installed.hold != nullptr ? installed.hold() : nullptr) {}

GilHold::~GilHold() {
  if (token_ != nullptr) installed.let_go(token_);
}

LockWithoutGil::LockWithoutGil(std::mutex& mutex) : mutex_(mutex) {
  if (mutex_.try_lock()) return;
  token_ = release_if_held();
  mutex_.lock();
}

LockWithoutGil::~LockWithoutGil() {
  mutex_.unlock();
  if (token_ != nullptr) installed.acquire(token_);
}

}  // namespace acc::runtime
