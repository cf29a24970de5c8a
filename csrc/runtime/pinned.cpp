#include "csrc/runtime/pinned.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"

namespace acc::runtime {
namespace {

using c10::Stream;

class PageAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, c10::DeviceType::CPU};
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t rounded = (nbytes + page - 1) / page * page;
    void* memory = rounded >= nbytes ? std::aligned_alloc(page, rounded) : nullptr;
    ACC_CHECK(memory != nullptr, "[pin_memory] cannot allocate ", nbytes,
              " bytes of host memory. Free some memory or pin less.");
    const std::lock_guard lock(mutex_);
    blocks_.emplace(reinterpret_cast<uintptr_t>(memory), nbytes);
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(nbytes);
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(nbytes);
    ++stats_.num_host_alloc;
    return {memory, memory, &release, c10::DeviceType::CPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
  }

  // A recorded copy holds the buffer itself; nothing else reads it behind the host's back.
  bool record_event(void* address, void*, Stream) override { return owns(address); }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override {
    const std::lock_guard lock(mutex_);
    for (c10::CachingAllocator::Stat* stat : levels()) stat->reset_accumulated();
    stats_.num_host_alloc = 0;
    stats_.num_host_free = 0;
  }
  void reset_peak_stats() override {
    const std::lock_guard lock(mutex_);
    for (c10::CachingAllocator::Stat* stat : levels()) stat->reset_peak();
  }

  bool owns(const void* address) {
    if (in_bad_fork()) return false;
    const auto at = reinterpret_cast<uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(at);
    if (block == blocks_.begin()) return false;
    --block;
    return at - block->first < block->second;
  }

  static PageAllocator& get() {
    // Never destroyed: pinned tensors may outlive static destructors.
    static PageAllocator& instance = *new PageAllocator;
    return instance;
  }

 private:
  static void release(void* memory) {
    // In a fork a thread of the parent may have held the lock.
    if (memory == nullptr || in_bad_fork()) return;
    get().forget(memory);
    std::free(memory);
  }
  void forget(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(reinterpret_cast<uintptr_t>(memory));
    if (block == blocks_.end()) return;
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->second);
    stats_.allocations.decrease(1);
    stats_.allocated_bytes.decrease(block->second);
    ++stats_.num_host_free;
    blocks_.erase(block);
  }
  std::array<c10::CachingAllocator::Stat*, 4> levels() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
            &stats_.allocated_bytes};
  }

  std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;  // begin -> bytes
  at::HostStats stats_;
};

// Without a lock of its own; see pinned.h.
class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    note_use();
    return backend().host_allocator().allocate(nbytes);
  }
  at::DeleterFnPtr raw_deleter() const override { return backend().host_allocator().raw_deleter(); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    backend().host_allocator().copy_data(to, from, nbytes);
  }
  bool record_event(void* address, void* context, Stream stream) override {
    const Stream native(Stream::UNSAFE, {backend().alias_type(), stream.device_index()},
                        stream.id());
    return backend().host_allocator().record_event(address, context, native);
  }
  void empty_cache() override { backend().host_allocator().empty_cache(); }
  at::HostStats get_stats() override { return backend().host_allocator().get_stats(); }
  void reset_accumulated_stats() override { backend().host_allocator().reset_accumulated_stats(); }
  void reset_peak_stats() override { backend().host_allocator().reset_peak_stats(); }
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static at::HostAllocator& instance = *new PinnedAllocator;
  return instance;
}

at::HostAllocator& page_allocator() { return PageAllocator::get(); }

bool owned_by_page_allocator(const void* address) { return PageAllocator::get().owns(address); }

}  // namespace acc::runtime
