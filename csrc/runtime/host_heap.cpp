#include "csrc/runtime/host_heap.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>

#include "csrc/base/blocks.h"
#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/fork.h"

namespace acc::runtime {
namespace {

// Smaller blocks come from the C library, which is faster with them and does not give them back
// one by one.
constexpr size_t kSmallestBlock = 64 << 10;
// Pages become usable in pieces of this size, so that the kernel is asked rarely.
constexpr uint64_t kCommitStep = 64 << 20;
constexpr uint64_t kHugePage = 2 << 20;

thread_local bool in_heap_scope = false;
thread_local c10::DeviceIndex in_pool_of = -1;

// Bytes that all heaps together may keep. Until a test asks for a limit there is none.
std::atomic<uint64_t> most_kept{std::numeric_limits<uint64_t>::max()};

// Under a limit the range would take from others what they need.
bool address_space_is_limited() {
  rlimit limit{};
  return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
}

uint64_t range_size() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  // Twice the memory: gaps take addresses too.
  const uint64_t bytes = 2 * static_cast<uint64_t>(pages) * static_cast<uint64_t>(page);
  return (bytes + kCommitStep - 1) / kCommitStep * kCommitStep;
}

class Heap {
 public:
  // Never destroyed: tensors may outlive static destructors.
  static Heap& get() {
    static Heap& instance = *new Heap;
    return instance;
  }
  // That of a device.
  static Heap& pool(c10::DeviceIndex device) {
    static std::array<std::once_flag, base::env::kMaxHostDevices> once;
    const auto at = static_cast<size_t>(device);
    std::call_once(once.at(at), [at] { pools()[at].store(new Heap, std::memory_order_release); });
    return *pools()[at].load(std::memory_order_acquire);
  }
  // Null for memory of somebody else.
  static Heap* owner(const void* memory) {
    if (get().owns(memory)) return &get();
    for (const std::atomic<Heap*>& pool : pools()) {
      Heap* const heap = pool.load(std::memory_order_acquire);
      if (heap != nullptr && heap->owns(memory)) return heap;
    }
    return nullptr;
  }
  static void trim_all() {
    for_each([](Heap& heap) { heap.trim(); });
  }
  static uint64_t kept_by_all() {
    uint64_t bytes = 0;
    for_each([&](Heap& heap) { bytes += heap.kept_bytes(); });
    return bytes;
  }

  bool usable() const { return begin_ != nullptr; }

  // Null when the memory has to come from elsewhere.
  void* take(size_t nbytes) {
    if (begin_ == nullptr || in_bad_fork()) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto offset = blocks_.take(nbytes);
    if (!offset.has_value()) return nullptr;
    if (!commit(*offset + nbytes)) {
      blocks_.give(*offset);
      return nullptr;
    }
    most_used_ = std::max(most_used_, blocks_.used());
    return begin_ + *offset;
  }

  void give(void* memory) {
    // Another thread of the parent may have held the lock when it forked.
    if (in_bad_fork()) return;
    const std::lock_guard lock(mutex_);
    blocks_.give(static_cast<uint64_t>(static_cast<char*>(memory) - begin_));
  }

  // In blocks, and what was in some since they were given back to the system.
  uint64_t kept_bytes() {
    const std::lock_guard lock(mutex_);
    return most_used_;
  }
  // How much more it will keep once it has a block of `nbytes`.
  uint64_t growth(uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    return blocks_.used() + nbytes - std::min(blocks_.used() + nbytes, most_used_);
  }

  bool owns(const void* memory) const {
    const auto* at = static_cast<const char*>(memory);
    return begin_ != nullptr && at >= begin_ && at < begin_ + capacity_;
  }

  void keep(int more) {
    if (in_bad_fork()) return;
    const std::lock_guard lock(mutex_);
    kept_ += more;
  }

  void trim() {
    if (begin_ == nullptr || in_bad_fork()) return;
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const std::lock_guard lock(mutex_);
    if (kept_ > 0) return;
    most_used_ = blocks_.used();
    blocks_.for_each_gap([&](uint64_t offset, uint64_t bytes) {
      const uint64_t first = (offset + page - 1) / page * page;
      const uint64_t last = std::min(offset + bytes, committed_) / page * page;
      if (first < last) madvise(begin_ + first, last - first, MADV_DONTNEED);
    });
  }

 private:
  template <class Visit>
  static void for_each(const Visit& visit) {
    visit(get());
    for (const std::atomic<Heap*>& pool : pools()) {
      Heap* const heap = pool.load(std::memory_order_acquire);
      if (heap != nullptr) visit(*heap);
    }
  }
  static std::array<std::atomic<Heap*>, base::env::kMaxHostDevices>& pools() {
    static std::array<std::atomic<Heap*>, base::env::kMaxHostDevices> all{};
    return all;
  }

  Heap() : capacity_(address_space_is_limited() ? 0 : range_size()), blocks_(capacity_) {
    if (capacity_ == 0) return;
    void* range = mmap(nullptr, capacity_ + kHugePage, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return;
    begin_ =
        static_cast<char*>(range) + (kHugePage - reinterpret_cast<uintptr_t>(range) % kHugePage);
    // Gigabytes that each step goes through miss the TLB less. What refuses it does without.
    madvise(begin_, capacity_, MADV_HUGEPAGE);
  }

  bool commit(uint64_t end) {
    if (end <= committed_) return true;
    if (address_space_is_limited()) return false;
    const uint64_t wanted =
        std::min(capacity_, (end + kCommitStep - 1) / kCommitStep * kCommitStep);
    if (mprotect(begin_ + committed_, wanted - committed_, PROT_READ | PROT_WRITE) != 0) {
      return false;
    }
    committed_ = wanted;
    return true;
  }

  const uint64_t capacity_;
  char* begin_ = nullptr;
  std::mutex mutex_;
  base::Blocks blocks_;
  uint64_t committed_ = 0;  // from the beginning, usable
  uint64_t most_used_ = 0;  // since the last trim
  int kept_ = 0;
};

c10::Allocator& plain_allocator() {
  static c10::Allocator& allocator = *c10::GetDefaultCPUAllocator();
  return allocator;
}

void release(void* memory) {
  if (memory == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(memory);
  Heap::owner(memory)->give(memory);
}

// Throws where a block is beyond the limit. As in torch's allocator on CUDA, what is cached is
// given back first, but not for a pool that is open.
void check_limit(Heap& heap, size_t nbytes) {
  const uint64_t limit = most_kept.load(std::memory_order_relaxed);
  if (limit == std::numeric_limits<uint64_t>::max()) return;
  const auto fits = [&] { return Heap::kept_by_all() + heap.growth(nbytes) <= limit; };
  if (fits()) return;
  if (in_pool_of < 0) Heap::trim_all();
  if (!fits()) throw std::bad_alloc();
}

void* take(size_t nbytes) {
  const bool in_pool = in_pool_of >= 0;
  if (!in_pool && nbytes < kSmallestBlock) return nullptr;
  Heap& heap = in_pool ? Heap::pool(in_pool_of) : Heap::get();
  check_limit(heap, nbytes);
  void* const memory = heap.take(nbytes);
  if (in_pool && memory == nullptr && nbytes > 0) throw std::bad_alloc();
  return memory;
}

c10::DataPtr allocate_here(size_t nbytes) {
  about_to_allocate(nbytes);
  void* const memory = take(nbytes);
  if (memory == nullptr) return plain_allocator().allocate(nbytes);
  c10::profiledCPUMemoryReporter().New(memory, nbytes);
  return {memory, memory, &release, c10::Device(c10::kCPU)};
}

class HostHeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override { return allocate_here(nbytes); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

// What stands in for the allocator of the CPU.
class CpuAllocator final : public c10::Allocator {
 public:
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      original.store(c10::GetCPUAllocator(), std::memory_order_release);
      c10::SetCPUAllocator(new CpuAllocator, UINT8_MAX);
    });
  }

  c10::DataPtr allocate(size_t nbytes) override {
    return in_heap_scope ? allocate_here(nbytes) : theirs()->allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return theirs()->is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

 private:
  static void release_any(void* memory) {
    if (Heap::owner(memory) != nullptr) return release(memory);
    theirs()->raw_deallocate(memory);
  }
  // Torch publishes its pointer to this allocator without an order of its own.
  static c10::Allocator* theirs() { return original.load(std::memory_order_acquire); }
  static inline std::atomic<c10::Allocator*> original{nullptr};
};

}  // namespace

c10::Allocator& host_heap() {
  static HostHeapAllocator& instance = *new HostHeapAllocator;
  return instance;
}

HostHeapScope::HostHeapScope(bool active) : previous_(in_heap_scope) {
  if (!active) return;
  CpuAllocator::install();
  in_heap_scope = true;
}

HostHeapScope::~HostHeapScope() { in_heap_scope = previous_; }

HostPoolScope::HostPoolScope(c10::DeviceIndex device) {
  ACC_CHECK(possible(device) && in_pool_of < 0);
  in_pool_of = device;
}

HostPoolScope::~HostPoolScope() { in_pool_of = -1; }

bool HostPoolScope::possible(c10::DeviceIndex device) { return Heap::pool(device).usable(); }

uint64_t HostPoolScope::bytes(c10::DeviceIndex device) { return Heap::pool(device).kept_bytes(); }

void HostPoolScope::keep(c10::DeviceIndex device) { Heap::pool(device).keep(1); }

void HostPoolScope::let_go(c10::DeviceIndex device) { Heap::pool(device).keep(-1); }

void trim_host_heap() { Heap::trim_all(); }

void limit_host_heap(std::optional<uint64_t> more) {
  trim_host_heap();
  most_kept.store(more.has_value() ? Heap::kept_by_all() + *more
                                   : std::numeric_limits<uint64_t>::max());
}

}  // namespace acc::runtime
