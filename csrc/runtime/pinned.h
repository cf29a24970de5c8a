#pragma once

#include <ATen/core/CachingHostAllocator.h>

// Pinned host memory. torch's name for memory that a device reads without a copy in between.
namespace acc::runtime {

// What is registered with torch: asks the backend's allocator at each call, because that one is
// chosen later.
at::HostAllocator& pinned_allocator();

// The host backend's: whole pages, returned to the system when freed. Thread safe.
at::HostAllocator& page_allocator();
// Whether an address lies in memory that `page_allocator` has given out.
bool owned_by_page_allocator(const void* address);

}  // namespace acc::runtime
