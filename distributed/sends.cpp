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

// What a group may have under way: each has a thread that waits for it, and a copy.
constexpr size_t kMostSends = 64;
constexpr size_t kMostBytes = size_t{256} << 20;
constexpr auto kLookAgain = std::chrono::milliseconds(20);

}  // namespace

uint64_t Sends::add(const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
                    at::Tensor memory) {
  {
    const std::lock_guard lock(mutex_);
    throw_failure();
  }
  c10::intrusive_ptr<c10d::Work> work = begin();
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = next_++;
    under_way_.emplace(number, Send{memory.nbytes()});
    bytes_ += memory.nbytes();
  }
  try {
    std::thread([self = shared_from_this(), work, memory, number]() mutable {
      self->end(*work, number);
      work.reset();
      memory.reset();
    }).detach();
  } catch (const std::system_error&) {  // no thread is left
    const runtime::GilRelease release;
    end(*work, number);
  }
  return number;
}

void Sends::end(c10d::Work& work, uint64_t number) {
  std::string failure;
  try {
    work.wait();
  } catch (...) {
    failure = runtime::text_of(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = std::move(failure);
  bytes_ -= under_way_.extract(number).mapped().bytes;
  taken_.notify_all();
}

void Sends::throw_failure() {
  const std::string failure = std::exchange(failure_, "");
  TORCH_CHECK_WITH(DistBackendError, failure.empty(),
                   "[torch.distributed] an earlier send of this group has failed: ", failure);
}

void Sends::wait_for(const std::function<bool()>& reached, std::chrono::milliseconds limit) {
  const runtime::GilRelease release;
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (failure_.empty() && !taken_.wait_for(lock, kLookAgain, reached)) {
    const size_t count = under_way_.size();
    lock.unlock();
    TORCH_CHECK_WITH(DistBackendError, !runtime::interrupted(),
                     "[torch.distributed] interrupted while waiting for others to receive.");
    TORCH_CHECK_WITH(DistBackendError,
                     limit == kNoTimeout || std::chrono::steady_clock::now() - begin < limit,
                     "[torch.distributed] the others have not received ", count,
                     " sends of this group within ", limit.count(), " ms.");
    lock.lock();
  }
  throw_failure();
}

void Sends::make_room(uint64_t number, std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = under_way_.find(number);
    if (found != under_way_.end()) found->second.awaited = true;
  }
  const auto few = [&] {
    return under_way_.size() == 1 || (under_way_.size() <= kMostSends && bytes_ <= kMostBytes);
  };
  wait_for([&] { return !under_way_.contains(number) || few(); }, limit);
}

void Sends::wait(std::chrono::milliseconds limit) {
  wait_for([this] { return under_way_.empty(); }, limit);
}

void Sends::wait_for_awaited(std::chrono::milliseconds limit) {
  const auto is_awaited = [](const auto& each) { return each.second.awaited; };
  wait_for([&] { return std::ranges::none_of(under_way_, is_awaited); }, limit);
}

void wait_for_sends() {
  for (const Group& group : all_groups()) {
    group.sends->wait_for_awaited(group.transport->getBackendOptions()->timeout);
  }
}

}  // namespace acc::distributed
