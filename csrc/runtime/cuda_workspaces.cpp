#include "csrc/runtime/cuda_workspaces.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace acc::runtime {
namespace {

using at::cuda::WorkspaceMapWithMutex;
using Entry = decltype(WorkspaceMapWithMutex::map)::mapped_type;

// Torch 2.11 notes the memory, later versions its size as well.
void set(c10::DataPtr& entry, c10::DataPtr memory, size_t) { entry = std::move(memory); }
template <class Sized>
void set(Sized& entry, c10::DataPtr memory, size_t nbytes) {
  entry = {std::move(memory), nbytes};
}
const void* address_of(const c10::DataPtr& entry) { return entry.get(); }
template <class Sized>
const void* address_of(const Sized& entry) {
  return entry.first.get();
}

void lend(WorkspaceMapWithMutex& workspaces, void* handle, void* stream, void* memory,
          size_t nbytes, c10::Device device) {
  // What somebody else has computed in on this stream may still be in use.
  static auto& replaced = *new std::vector<Entry>;
  const std::unique_lock lock(workspaces.mutex);
  Entry& entry = workspaces.map[{handle, stream}];
  if (address_of(entry) == memory) return;
  if (address_of(entry) != nullptr) replaced.push_back(std::move(entry));
  set(entry, c10::DataPtr(memory, device), nbytes);
}

// The one of a device.
void* workspace_of(c10::DeviceIndex device, size_t nbytes) {
  static std::mutex mutex;
  static auto& all = *new std::map<c10::DeviceIndex, c10::DataPtr>;
  const std::lock_guard lock(mutex);
  c10::DataPtr& memory = all[device];
  if (!memory) memory = c10::cuda::CUDACachingAllocator::get()->allocate(nbytes);
  return memory.get();
}

}  // namespace

void lend_workspace(void* handle, void* stream, void* memory, size_t nbytes, c10::Device device) {
  lend(at::cuda::cublas_handle_stream_to_workspace(), handle, stream, memory, nbytes, device);
  lend(at::cuda::cublaslt_handle_stream_to_workspace(), handle, stream, memory, nbytes, device);
}

void lend_workspaces(c10::cuda::CUDAStream stream) {
  const size_t nbytes =
      std::max(at::cuda::getChosenWorkspaceSize(), at::cuda::getCUDABlasLtWorkspaceSize());
  if (nbytes == 0) return;
  // cublasLt's handle is cuBLAS's: torch casts it.
  void* const handle = at::cuda::getCurrentCUDABlasHandle();
  void* const memory = workspace_of(stream.device_index(), nbytes);
  lend_workspace(handle, stream.stream(), memory, nbytes, stream.device());
}

}  // namespace acc::runtime
