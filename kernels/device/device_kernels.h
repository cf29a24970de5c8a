#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "kernels/codegen/cuda_launch.h"
#include "kernels/jit/toolchain.h"

// Generated kernels of a GPU: what makes them, and their launches.
namespace acc::device {

class DeviceKernels {
 public:
  DeviceKernels() = default;
  DeviceKernels(const DeviceKernels&) = delete;
  DeviceKernels& operator=(const DeviceKernels&) = delete;
  virtual ~DeviceKernels() = default;

  virtual const jit::Toolchain& toolchain() const = 0;
  virtual int64_t multiprocessors() const = 0;
  // Loads what the toolchain made onto this device, as CUDA else would at its first launch: that
  // may be in the middle of a capture.
  virtual void prepare(void* function) const = 0;
  // `function`: from the toolchain. `table`: in the GPU's memory, for so many calls, and the stage:
  // see kernels/codegen/render.h. On the current stream.
  virtual void launch(void* function, const codegen::CudaLaunch& launch, const int64_t* table,
                      int calls, int stage) const = 0;
};

// Those of a device; null on the host, whose kernels are functions that are called. The first call
// for a device asks what it is.
const DeviceKernels* device_kernels(c10::DeviceIndex device);

// Whether there are some, without asking a device.
bool are_of_gpus();

// The kernels of every device from now on, where there is no GPU: for tests. They live for ever.
void use_device_kernels(const DeviceKernels* kernels);

}  // namespace acc::device
