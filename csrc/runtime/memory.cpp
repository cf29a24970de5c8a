#include "csrc/runtime/memory.h"

#include <array>
#include <atomic>

#include "csrc/base/env.h"

namespace acc::runtime {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

class Level {
 public:
  void add(int64_t amount) noexcept {
    const int64_t now = current_.fetch_add(amount, std::memory_order_relaxed) + amount;
    gained_.fetch_add(amount, std::memory_order_relaxed);
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void subtract(int64_t amount) noexcept {
    current_.fetch_sub(amount, std::memory_order_relaxed);
    lost_.fetch_add(amount, std::memory_order_relaxed);
  }
  void reset_peak() noexcept { peak_.store(current_.load()); }
  void reset_accumulated() noexcept {
    gained_.store(0);
    lost_.store(0);
  }
  Stat read() const {
    Stat stat;
    stat.current = current_.load();
    stat.peak = peak_.load();
    stat.allocated = gained_.load();
    stat.freed = lost_.load();
    return stat;
  }

 private:
  std::atomic<int64_t> current_{0}, peak_{0}, gained_{0}, lost_{0};
};

struct alignas(64) DeviceMemory {
  Level bytes;
  Level blocks;
};

std::array<DeviceMemory, base::env::kMaxHostDevices> devices;

DeviceMemory* find(c10::DeviceIndex device) noexcept {
  const auto index = static_cast<size_t>(device);
  return index < devices.size() ? &devices[index] : nullptr;
}

}  // namespace

void note_alloc(c10::DeviceIndex device, size_t nbytes) noexcept {
  DeviceMemory* memory = find(device);
  if (memory == nullptr || nbytes == 0) return;
  memory->bytes.add(static_cast<int64_t>(nbytes));
  memory->blocks.add(1);
}

void note_free(c10::DeviceIndex device, size_t nbytes) noexcept {
  DeviceMemory* memory = find(device);
  if (memory == nullptr || nbytes == 0) return;
  memory->bytes.subtract(static_cast<int64_t>(nbytes));
  memory->blocks.subtract(1);
}

c10::CachingDeviceAllocator::DeviceStats counted_memory(c10::DeviceIndex device) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  const DeviceMemory* memory = find(device);
  if (memory == nullptr) return stats;
  constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
  const Stat bytes = memory->bytes.read();
  for (StatArray* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                           &stats.requested_bytes}) {
    (*array)[kAll] = bytes;
  }
  const Stat blocks = memory->blocks.read();
  for (StatArray* array : {&stats.allocation, &stats.active, &stats.segment}) {
    (*array)[kAll] = blocks;
  }
  stats.num_device_alloc = blocks.allocated;
  stats.num_device_free = blocks.freed;
  return stats;
}

void reset_peak_memory(c10::DeviceIndex device) noexcept {
  if (DeviceMemory* memory = find(device)) {
    memory->bytes.reset_peak();
    memory->blocks.reset_peak();
  }
}

void reset_accumulated_memory(c10::DeviceIndex device) noexcept {
  if (DeviceMemory* memory = find(device)) {
    memory->bytes.reset_accumulated();
    memory->blocks.reset_accumulated();
  }
}

}  // namespace acc::runtime
