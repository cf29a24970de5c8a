#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

// The storage of an acc tensor. All lazy state of a tensor hangs here, so views, detached tensors
// and `is_alias_of` need no special care.
namespace acc::record {

// Why a storage has no valid contents: the operator and line that failed. It stays until the whole
// storage is written by a copy, or resized.
struct Poison {
  std::string message;
};

// Invariants: `memory` is empty while the contents are pending or were never written; the data
// pointer is then a unique reserved address that faults when read. Afterwards it is the address of
// `memory`. Fields are guarded by the trace mutex of the device.
class LazyStorage final : public c10::StorageImpl {
 public:
  LazyStorage(c10::SymInt nbytes, c10::DataPtr address, c10::Allocator* allocator, bool resizable);
  ~LazyStorage() override;
  void release_resources() override;

  bool has_memory() const { return static_cast<bool>(memory_); }
  const c10::Storage& memory() const { return memory_; }
  // Gives the storage its contents: a storage of the backend's alias device. Replaces the address.
  void set_memory(c10::Storage memory);
  // Takes the contents away and returns them; the storage has a fresh reserved address of `nbytes`.
  c10::Storage take_memory(size_t nbytes);

  // Position in the trace being recorded; valid while `trace` is the number of that trace.
  uint64_t trace = 0;
  uint32_t entry = 0;
  std::shared_ptr<const Poison> poison;
  // Another library shares the memory (DLPack): operators on it run at once, for good.
  bool observed = false;
  // Somebody was told the address: it stays the same.
  bool pinned = false;
  // What `record_stream` named before somebody was told the address: nobody can have used it there.
  std::vector<c10::Stream> streams;

 private:
  void forget_memory();
  c10::Storage memory_;
  size_t counted_ = 0;
};

// Throws for a poisoned storage, and says what to do.
void check_contents(const LazyStorage& storage);

// The lazy storage behind an acc tensor. The caller knows that the tensor is one.
inline LazyStorage* storage_of(const at::TensorBase& tensor) {
  return static_cast<LazyStorage*>(
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

// Bytes of the storages of a device's trace that have died since it began, and left it alone with
// their memory. Thread safe, no locks.
uint64_t left_behind(c10::DeviceIndex device);
void begin_trace(c10::DeviceIndex device, uint64_t number);

// Throws OutOfMemoryError for what the device can never have: allocating it later would fail far
// from the line that asked.
void refuse_absurd(size_t nbytes, c10::DeviceIndex device);

c10::intrusive_ptr<LazyStorage> make_storage(size_t nbytes, c10::DeviceIndex device);

// A plain tensor of the acc device over `storage`.
at::Tensor make_tensor(c10::intrusive_ptr<LazyStorage> storage, c10::ScalarType dtype,
                       c10::IntArrayRef sizes, c10::IntArrayRef strides);

// Marks `tensor` as lazily conjugated or negated where `like` is, or takes the mark away.
void copy_flags(const at::Tensor& like, const at::Tensor& tensor);

// Registers LazyStorage as the StorageImpl of the acc device.
void register_storage();

}  // namespace acc::record
