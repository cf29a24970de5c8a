#include "csrc/runtime/cuda_workspaces.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace acc::runtime {
namespace {

using at::cuda::WorkspaceMapWithMutex;
using Key = decltype(WorkspaceMapWithMutex::map)::key_type;
using Entry = decltype(WorkspaceMapWithMutex::map)::mapped_type;

// Torch 2.11 and 2.12 note the memory, later versions its size as well.
const void* address_of(const c10::DataPtr& entry) { return entry.get(); }
template <class Sized>
const void* address_of(const Sized& entry) {
  return entry.first.get();
}
c10::DataPtr borrowed(const c10::DataPtr& own) { return {own.get(), own.device()}; }
template <class Sized>
Sized borrowed(const Sized& own) {
  return {borrowed(own.first), own.second};
}

// What torch made for itself, which is no longer torch's; nothing where it made nothing.
Entry take(WorkspaceMapWithMutex& workspaces, const Key& key) {
  const std::unique_lock lock(workspaces.mutex);
  const auto found = workspaces.map.find(key);
  return found == workspaces.map.end() ? Entry() : std::exchange(found->second, Entry());
}

void lend(WorkspaceMapWithMutex& workspaces, const Key& key, const Entry& own) {
  if (address_of(own) == nullptr) return;
  // What somebody else has computed in on this stream may still be in use.
  static auto& replaced = *new std::vector<Entry>;
  const std::unique_lock lock(workspaces.mutex);
  Entry& entry = workspaces.map[key];
  if (address_of(entry) == address_of(own)) return;
  if (address_of(entry) != nullptr) replaced.push_back(std::move(entry));
  entry = borrowed(own);
}

// Those of a device. That of cublasLt is empty where it computes in cuBLAS's, as it does by
// default.
struct Workspaces {
  Entry cublas;
  Entry cublas_lt;
};

// Torch makes them, of the size it wants: the function that tells it is not exported by torch 2.12.
Workspaces make(c10::cuda::CUDAStream stream, const Key& key) {
  const c10::cuda::CUDAStreamGuard current(stream);
  at::cuda::getCurrentCUDABlasHandle();
  at::cuda::getCUDABlasLtWorkspace();
  return {take(at::cuda::cublas_handle_stream_to_workspace(), key),
          take(at::cuda::cublaslt_handle_stream_to_workspace(), key)};
}

}  // namespace

void lend_workspaces(c10::cuda::CUDAStream stream) {
  static std::mutex mutex;
  static auto& all = *new std::map<c10::DeviceIndex, Workspaces>;
  // cublasLt's handle is cuBLAS's: torch casts it.
  const Key key{at::cuda::getCurrentCUDABlasHandle(), stream.stream()};
  const std::lock_guard lock(mutex);
  auto own = all.find(stream.device_index());
  if (own == all.end()) own = all.emplace(stream.device_index(), make(stream, key)).first;
  lend(at::cuda::cublas_handle_stream_to_workspace(), key, own->second.cublas);
  lend(at::cuda::cublaslt_handle_stream_to_workspace(), key, own->second.cublas_lt);
}

}  // namespace acc::runtime
