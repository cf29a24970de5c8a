#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace acc::runtime {

// The allocator of the acc device: hands out reserved addresses (address_space.h), the memory comes
// when work is submitted. Its statistics are the backend's; reading them submits pending work, so
// that they say what an eager device would say.
c10::DeviceAllocator& device_allocator();

}  // namespace acc::runtime
