#include "distributed/sends.h"

#include <c10/util/Exception.h>

#include <exception>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"

namespace acc::distributed {
namespace {

// What a group may have under way: each has a thread that waits for it, and a copy.
constexpr size_t kMostSends = 64;
constexpr size_t kMostBytes = size_t{256} << 20;
constexpr auto kLookAgain = std::chrono::milliseconds(20);

void check_interrupt() {
  TORCH_CHECK_WITH(DistBackendError, !runtime::interrupted(),
                   "[torch.distributed] interrupted while waiting for others to receive.");
}

}  // namespace

void Sends::make_room(size_t bytes) {
  const runtime::GilRelease release;
  std::unique_lock lock(mutex_);
  const auto has_room = [&] {
    return count_ == 0 || (count_ < kMostSends && bytes_ + bytes <= kMostBytes);
  };
  while (failure_.empty() && !taken_.wait_for(lock, kLookAgain, has_room)) {
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  throw_failure();
}

void Sends::keep(c10::intrusive_ptr<c10d::Work> work, at::Tensor memory) {
  const size_t bytes = memory.nbytes();
  {
    const std::lock_guard lock(mutex_);
    ++count_;
    bytes_ += bytes;
  }
  try {
    std::thread([self = shared_from_this(), work, memory, bytes]() mutable {
      self->end(*work, bytes);
      work.reset();
      memory.reset();
    }).detach();
  } catch (const std::system_error&) {  // no thread is left
    const runtime::GilRelease release;
    end(*work, bytes);
  }
}

void Sends::end(c10d::Work& work, size_t bytes) {
  std::string failure;
  try {
    work.wait();
  } catch (...) {
    failure = runtime::text_of(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = std::move(failure);
  --count_;
  bytes_ -= bytes;
  taken_.notify_all();
}

void Sends::throw_failure() {
  const std::string failure = std::exchange(failure_, "");
  TORCH_CHECK_WITH(DistBackendError, failure.empty(),
                   "[torch.distributed] an earlier send of this group has failed: ", failure);
}

void Sends::wait(std::chrono::milliseconds limit) {
  const runtime::GilRelease release;
  const auto end = std::chrono::steady_clock::now() + limit;
  std::unique_lock lock(mutex_);
  while (!taken_.wait_for(lock, kLookAgain, [this] { return count_ == 0; })) {
    const size_t count = count_;
    lock.unlock();
    check_interrupt();
    TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < end,
                     "[torch.distributed] the others have not received ", count,
                     " sends of this group within ", limit.count(), " ms.");
    lock.lock();
  }
  throw_failure();
}

}  // namespace acc::distributed
