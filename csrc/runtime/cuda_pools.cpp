#include "csrc/runtime/cuda_pools.h"

#include <ATen/core/CachingHostAllocator.h>

#include <exception>
#include <mutex>
#include <utility>

namespace acc::runtime {
namespace {

class PinnedPool final : public AllocatorPool {
 public:
  explicit PinnedPool(c10::MempoolId_t id) : id_(id) {}
  void begin() override {
    host().begin_allocate_to_pool(id_, [](c10::Stream) { return false; });
  }
  void end() override { host().end_allocate_to_pool(id_); }
  void release() override { host().release_pool(id_); }

 private:
  static at::HostAllocator& host() { return *at::getHostAllocator(c10::DeviceType::CUDA); }
  const c10::MempoolId_t id_;
};

void end_and_release(AllocatorPool& pool, bool begun) noexcept {
  try {
    pool.end();
    begun = true;
  } catch (const std::exception&) {
  }
  if (begun) pool.release();
}

// How many are open, and what guards the number.
int open_pools = 0;
std::mutex& opening() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

}  // namespace

std::unique_ptr<AllocatorPool> pinned_pool(c10::MempoolId_t id) {
  return std::make_unique<PinnedPool>(id);
}

PrivatePool::~PrivatePool() {
  if (!held_) return;
  device_->release();
  pinned_->release();
}

void PrivatePool::open() {
  device_->begin();
  if (held_) return device_->release();  // one holder is enough
  pinned_->begin();
  pinned_->end();
  held_ = true;
}

void PrivatePool::take_back(bool begun) noexcept {
  end_and_release(*pinned_, begun);
  end_and_release(*device_, begun);
}

void OpenPool::open() {
  const std::lock_guard lock(opening());
  pool_->open();
  open_ = true;
  if (!std::exchange(counted_, true)) ++open_pools;
}

void OpenPool::lend() {
  if (std::exchange(open_, false)) pool_->close();
}

void OpenPool::close() {
  lend();
  const std::lock_guard lock(opening());
  if (std::exchange(counted_, false)) --open_pools;
}

void OpenPool::when_none(const std::function<void()>& work) {
  const std::lock_guard lock(opening());
  if (open_pools == 0) work();
}

}  // namespace acc::runtime
