#include "csrc/runtime/gil.h"

namespace acc::runtime {
namespace {

Gil interpreter;

void* release_if_held() {
  return interpreter.held != nullptr && interpreter.held() ? interpreter.release() : nullptr;
}

}  // namespace

void install_gil(const Gil& gil) { interpreter = gil; }

bool is_interrupt(const std::exception& error) {
  return interpreter.is_interrupt != nullptr && interpreter.is_interrupt(error);
}

bool interrupted() { return interpreter.interrupted != nullptr && interpreter.interrupted(); }

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
  mutex_.lock();
}

LockWithoutGil::~LockWithoutGil() {
  mutex_.unlock();
  if (token_ != nullptr) interpreter.acquire(token_);
}

}  // namespace acc::runtime
