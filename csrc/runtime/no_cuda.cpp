#include "csrc/runtime/backend.h"
#include "csrc/runtime/nvidia.h"

// Stands in for backend_cuda.cpp in builds without CUDA.
namespace acc::runtime {

Backend* cuda_backend() { return nullptr; }

void probe_cuda(GpuProbe&) {}

}  // namespace acc::runtime
