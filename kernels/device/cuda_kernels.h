#pragma once

#include "kernels/device/device_kernels.h"

namespace acc::device {

// Of a CUDA device. Never null: a build without CUDA has no such device to ask for.
const DeviceKernels* cuda_kernels(c10::DeviceIndex device);

}  // namespace acc::device
