#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Why a machine with an NVIDIA GPU cannot use it.
namespace acc::runtime {

struct GpuProbe {
  bool present = false;        // the kernel driver is loaded and has a device
  std::string driver_version;  // "550.54.15"; empty: unknown
  bool built_with_cuda = false;
  int cuda_version = 0;  // of the build: 13000 is 13.0
  int devices = 0;       // that CUDA sees
  std::string error;     // what CUDA says when it sees none
  // CUDA works and has no device: the user hid them (CUDA_VISIBLE_DEVICES).
  bool none_visible = false;
  std::vector<int> capabilities;  // of those devices: 90 is 9.0; empty: unknown
  std::string architectures;      // what torch's kernels were compiled for, as nvcc's options
};

// Looks at this machine. Makes no CUDA context.
GpuProbe probe_gpu();

// The reason and what to do about it, in whole sentences; nothing when there is no GPU, when the
// first one is usable, or when they are hidden on purpose.
std::optional<std::string> unusable_gpu(const GpuProbe& probe);

// So of devices behind the first, where that one is usable.
std::optional<std::string> unusable_beside(const GpuProbe& probe);

// The oldest driver that runs programs built for a CUDA version, as its major number; 0: unknown.
int required_driver(int cuda_version);

// Whether kernels that nvcc compiled with these options run on a device: machine code of its major
// version ("code=sm_86", "sm_90a" on 9.0 only), or text for the driver to compile ("compute_75").
bool runs_on(int capability, std::string_view options);

// What the CUDA part of the build adds to the probe; defined beside the backend.
void probe_cuda(GpuProbe& probe);

}  // namespace acc::runtime
