#include "kernels/device/cuda_kernels.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "kernels/codegen/render.h"
#include "kernels/jit/files.h"
#include "kernels/jit/gpu_toolchain.h"

namespace acc::device {
namespace {

// The directory of the file that a function was loaded from, with a slash; "" when unknown.
std::string directory_of(const void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

// NVRTC of the CUDA that this process uses lies beside its runtime, in NVIDIA's packages as in a
// toolkit; in those for CUDA 12 in a folder of its own. Elsewhere the loader may know where.
std::string nvrtc_library() {
  const std::string name = base::concat("libnvrtc.so.", CUDART_VERSION / 1000);
  const std::string runtime = directory_of(reinterpret_cast<const void*>(&cudaGetDeviceCount));
  for (const char* folder : {"", "../../cuda_nvrtc/lib/"}) {
    const std::string path = base::concat(runtime, folder, name);
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return name;
}

std::string nvrtc_program() {
  return directory_of(reinterpret_cast<const void*>(&cuda_kernels)) + "acc_nvrtc";
}

class CudaToolchain final : public jit::GpuToolchain {
 public:
  CudaToolchain(c10::DeviceIndex device, const runtime::DeviceProperties& properties)
      : GpuToolchain(nvrtc_program(), nvrtc_library(),
                     base::concat("sm_", properties.major, properties.minor),
                     {std::begin(codegen::kCudaOptions), std::end(codegen::kCudaOptions)}),
        device_(device) {}

  void* load(int fd, std::string& problem) const override {
    std::string bytes;
    if (jit::read_all(fd, bytes)) return load(bytes, problem);
    problem = jit::error_text(errno);
    return nullptr;
  }
  void* load(std::string_view bytes, std::string& problem) const override {
    const c10::cuda::CUDAGuard guard(device_);
    cudaLibrary_t library = nullptr;
    const cudaError_t error =
        cudaLibraryLoadData(&library, bytes.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (error == cudaSuccess) return library;
    problem = told(error);
    return nullptr;
  }
  void* find_function(void* library, const std::string& name) const override {
    const c10::cuda::CUDAGuard guard(device_);
    cudaKernel_t kernel = nullptr;
    const cudaError_t error =
        cudaLibraryGetKernel(&kernel, static_cast<cudaLibrary_t>(library), name.c_str());
    if (error == cudaSuccess) return kernel;
    told(error);
    return nullptr;
  }

 private:
  // The error is not to fail a later call.
  static std::string told(cudaError_t error) {
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
  }

  const c10::DeviceIndex device_;
};

class CudaKernels final : public DeviceKernels {
 public:
  CudaKernels(c10::DeviceIndex device, const runtime::DeviceProperties& properties)
      : device_(device),
        toolchain_(device, properties),
        multiprocessors_(properties.multiprocessors),
        shared_(shared_of(device)) {}

  const jit::Toolchain& toolchain() const override { return toolchain_; }
  int64_t multiprocessors() const override { return multiprocessors_; }
  void prepare(void* function) const override {
    const c10::cuda::CUDAGuard guard(device_);
    cudaFuncAttributes attributes;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, function));
    C10_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_)));
  }
  void launch(void* function, const codegen::CudaLaunch& launch, const int64_t* table, int calls,
              int stage) const override {
    void* arguments[] = {&table, &calls, &stage};
    C10_CUDA_CHECK(cudaLaunchKernel(function, dim3(launch.blocks), dim3(launch.x, launch.y),
                                    arguments, std::min(launch.shared, shared_),
                                    c10::cuda::getCurrentCUDAStream().stream()));
  }

 private:
  // What a block may have of a multiprocessor's memory, so that as many threads are on it as their
  // registers have room for at least.
  static uint32_t shared_of(c10::DeviceIndex device) {
    constexpr int kBlocks = codegen::kThreadsAtOnce / codegen::kThreadsOfRows;
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
      return value;
    };
    return static_cast<uint32_t>(
        std::min(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / kBlocks -
                     attribute(cudaDevAttrReservedSharedMemoryPerBlock),
                 attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)));
  }

  const c10::DeviceIndex device_;
  const CudaToolchain toolchain_;
  const int64_t multiprocessors_;
  const uint32_t shared_;  // bytes
};

}  // namespace

const DeviceKernels* cuda_kernels(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto& all = *new std::map<c10::DeviceIndex, std::unique_ptr<const CudaKernels>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const CudaKernels>& kernels = all[device];
  if (kernels == nullptr) {
    kernels = std::make_unique<CudaKernels>(device, runtime::backend().properties(device));
  }
  return kernels.get();
}

}  // namespace acc::device
