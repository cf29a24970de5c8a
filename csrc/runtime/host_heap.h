#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>

// Memory of the host executor: large blocks from one range that is kept between steps.
//
// The C library gives memory back to the system as soon as the upper end of its heap is free, and
// takes it again in the next step, page by page: measured at a fifth of some steps and half of
// others. It also places blocks worse, so that a step needs up to twice what is alive. Here freed
// blocks are used again and stay until `trim_host_heap`.
//
// Operators allocate their results themselves, through PyTorch's allocator of the CPU. While a
// HostHeapScope is alive, such allocations of its thread come from here too; for everyone else that
// allocator does what it always did.
namespace acc::runtime {

// CPU memory: from the heap, or from PyTorch's own allocator when the block is small, the heap is
// exhausted or the process runs under a limit on virtual memory.
c10::Allocator& host_heap();

// Makes allocations of CPU memory in this thread come from `host_heap`. May be nested.
class HostHeapScope {
 public:
  explicit HostHeapScope(bool active);
  ~HostHeapScope();
  HostHeapScope(const HostHeapScope&) = delete;
  HostHeapScope& operator=(const HostHeapScope&) = delete;

 private:
  const bool previous_;
};

// Makes what this thread takes from `host_heap`, blocks of any size, come from a range of the
// device's own, whose blocks go nowhere else when they are given back: captured work finds its
// memory there. May not be nested.
class HostPoolScope {
 public:
  explicit HostPoolScope(c10::DeviceIndex device);
  ~HostPoolScope();
  HostPoolScope(const HostPoolScope&) = delete;
  HostPoolScope& operator=(const HostPoolScope&) = delete;

  // False where no such range can be had (a limit on virtual memory).
  static bool possible(c10::DeviceIndex device);
  // In blocks of the device's range, and in freed ones that were not given back to the system.
  static uint64_t bytes(c10::DeviceIndex device);
  // While it is kept, what is written to freed blocks of the range stays there: captured work has
  // its intermediates in them. As often let go as kept.
  static void keep(c10::DeviceIndex device);
  static void let_go(c10::DeviceIndex device);
};

// Gives the memory of freed blocks back to the system, but for ranges that are kept.
void trim_host_heap();

// For tests: from now on there is room for `more` bytes beyond what is in blocks now, as on a GPU
// of that size: freed blocks of one range are in the way of another until they are given back.
void limit_host_heap(std::optional<uint64_t> more);

}  // namespace acc::runtime
