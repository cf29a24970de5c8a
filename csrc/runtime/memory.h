#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>

// Counts the memory of the host backend's devices: what storages hold, not what is reserved or
// pending. On CUDA the caching allocator counts and these numbers are not shown. Thread safe, no
// locks. A device index must be below env::kMaxHostDevices; others are ignored.
namespace acc::runtime {

void note_alloc(c10::DeviceIndex device, size_t nbytes) noexcept;
void note_free(c10::DeviceIndex device, size_t nbytes) noexcept;

// Bytes and blocks, in the form that torch.accelerator.memory_stats() prints: `allocated`, `active`
// and `reserved` are the same here, and there is one pool.
c10::CachingDeviceAllocator::DeviceStats counted_memory(c10::DeviceIndex device);

// Peaks become the current values; accumulated counts become zero.
void reset_peak_memory(c10::DeviceIndex device) noexcept;
void reset_accumulated_memory(c10::DeviceIndex device) noexcept;

}  // namespace acc::runtime
