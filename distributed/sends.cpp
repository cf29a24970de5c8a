#include "distributed/sends.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "distributed/groups.h"

namespace acc::distributed {
namespace {

// What a group may have under way before those who wait for a send wait for room, too.
constexpr size_t kMostSends = 64;
constexpr size_t kMostBytes = size_t{256} << 20;
// And before none begins: each has a thread that waits for it, and a copy.
constexpr size_t kMostThreads = 1024;
constexpr auto kLookAgain = std::chrono::milliseconds(20);

}  // namespace

uint64_t Sends::add(const std::function<c10::intrusive_ptr<c10d::Work>()>& begin, at::Tensor memory,
                    std::chrono::milliseconds timeout) {
  const runtime::GilRelease release;
  std::unique_lock lock(mutex_);
  throw_failure(nullptr);
  wait_for(lock, [this] { return under_way_.size() < kMostThreads; }, kNoTimeout);
  lock.unlock();
  c10::intrusive_ptr<c10d::Work> work = begin();
  lock.lock();
  const uint64_t number = next_++;
  under_way_.emplace(number, Send{memory.nbytes()});
  bytes_ += memory.nbytes();
  lock.unlock();
  try {
    std::thread([self = shared_from_this(), work, memory, timeout, number]() mutable {
      self->end(*work, timeout, number);
      work.reset();
      memory.reset();
    }).detach();
  } catch (const std::system_error&) {  // no thread is left
    end(*work, timeout, number);
  }
  return number;
}

void Sends::end(c10d::Work& work, std::chrono::milliseconds timeout, uint64_t number) {
  std::string failure;
  try {
    work.wait(timeout);
  } catch (...) {
    failure = runtime::text_of(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  if (!failure.empty()) failures_.emplace(number, std::move(failure));
  bytes_ -= under_way_.extract(number).mapped().bytes;
  taken_.notify_all();
}

void Sends::throw_failure(const uint64_t* of) {
  const auto found = of == nullptr ? failures_.begin() : failures_.find(*of);
  if (found == failures_.end()) return;
  const std::string failure = failures_.extract(found).mapped();
  C10_THROW_ERROR(DistBackendError,
                  "[torch.distributed] " +
                      std::string(of == nullptr ? "an earlier send of this group has failed: "
                                                : "the send has failed: ") +
                      failure);
}

void Sends::wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached,
                     std::chrono::milliseconds limit) {
  const auto begin = std::chrono::steady_clock::now();
  while (!taken_.wait_for(lock, kLookAgain, reached)) {
    const size_t count = under_way_.size();
    const std::string failed =
        failures_.empty() ? "" : " One has failed: " + failures_.begin()->second;
    lock.unlock();
    TORCH_CHECK_WITH(DistBackendError, !runtime::interrupted(),
                     "[torch.distributed] interrupted while waiting for others to receive.",
                     failed);
    TORCH_CHECK_WITH(DistBackendError,
                     limit == kNoTimeout || std::chrono::steady_clock::now() - begin < limit,
                     "[torch.distributed] the others have not received ", count,
                     " sends of this group within ", limit.count(), " ms.", failed);
    lock.lock();
  }
}

void Sends::note_awaited(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = under_way_.find(number);
  if (found != under_way_.end()) found->second.awaited = true;
}

void Sends::make_room(uint64_t number, std::chrono::milliseconds limit) {
  const runtime::GilRelease release;
  note_awaited(number);
  std::unique_lock lock(mutex_);
  const auto few = [&] {
    return under_way_.size() == 1 || (under_way_.size() <= kMostSends && bytes_ <= kMostBytes);
  };
  wait_for(lock, [&] { return !under_way_.contains(number) || few(); }, limit);
  throw_failure(&number);
}

void Sends::wait(std::chrono::milliseconds limit) {
  const runtime::GilRelease release;
  std::unique_lock lock(mutex_);
  wait_for(lock, [this] { return under_way_.empty(); }, limit);
  throw_failure(nullptr);
}

void Sends::wait_for_awaited(std::chrono::milliseconds limit) {
  const runtime::GilRelease release;
  std::unique_lock lock(mutex_);
  const auto is_awaited = [](const auto& each) { return each.second.awaited; };
  wait_for(lock, [&] { return std::ranges::none_of(under_way_, is_awaited); }, limit);
  throw_failure(nullptr);
}

void wait_for_sends() {
  std::exception_ptr first;
  for (const Group& group : all_groups()) {
    try {
      group.sends->wait_for_awaited(group.transport->getBackendOptions()->timeout);
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace acc::distributed
