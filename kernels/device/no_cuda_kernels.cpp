#include "csrc/base/check.h"
#include "kernels/device/cuda_kernels.h"

namespace acc::device {

const DeviceKernels* cuda_kernels(c10::DeviceIndex) { ACC_FAIL("a build without CUDA"); }

}  // namespace acc::device
