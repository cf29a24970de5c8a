#include "lazy/record/storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/address_space.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/memory.h"
#include "lazy/record/watch.h"

namespace acc::record {
namespace {

void keep(void*) {}

c10::DataPtr reserved(size_t nbytes, c10::Device device) {
  return {runtime::reserve(nbytes), nullptr, &keep, device};
}

c10::intrusive_ptr<c10::StorageImpl> create(c10::StorageImpl::use_byte_size_t, c10::SymInt nbytes,
                                            c10::DataPtr data, c10::Allocator* allocator,
                                            bool resizable) {
  const auto bytes = static_cast<size_t>(nbytes.expect_int());
  c10::Device device = data.device();
  // Our own allocator's context is the address itself.
  ACC_CHECK(data.get_context() == nullptr || data.get_context() == data.get(),
            "[storage] a part of an acc storage, of ", bytes,
            " bytes, would be a copy that says nothing of it. Slice a tensor over the storage.");
  if (device.type() != c10::DeviceType::PrivateUse1) {
    // No pointer was given; the allocator says which device is current.
    data = allocator->allocate(bytes);
    device = data.device();
  }
  if (allocator == nullptr) allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return c10::make_intrusive<LazyStorage>(std::move(nbytes), std::move(data), allocator, resizable);
}

struct Left {
  std::atomic<uint64_t> trace{0};
  std::atomic<uint64_t> bytes{0};
};

Left& left_of(c10::DeviceIndex device) {
  static std::array<Left, base::env::kMaxHostDevices> all{};
  return all.at(static_cast<size_t>(device));
}

}  // namespace

uint64_t left_behind(c10::DeviceIndex device) {
  return left_of(device).bytes.load(std::memory_order_relaxed);
}

void begin_trace(c10::DeviceIndex device, uint64_t number) {
  left_of(device).trace.store(number, std::memory_order_relaxed);
  left_of(device).bytes.store(0, std::memory_order_relaxed);
}

LazyStorage::LazyStorage(c10::SymInt nbytes, c10::DataPtr address, c10::Allocator* allocator,
                         bool resizable)
    : c10::StorageImpl(use_byte_size_t(), std::move(nbytes), std::move(address), allocator,
                       resizable) {
  if (watching()) note_birth(this);
}

LazyStorage::~LazyStorage() { forget_memory(); }

// Runs when the last tensor is gone, although a pending trace may still know the object weakly.
void LazyStorage::release_resources() {
  if (memory_) {
    // Captured work holds its results' memory, too, for good.
    Left& left = left_of(device().index());
    if (trace == left.trace.load(std::memory_order_relaxed)) left.bytes += memory_.nbytes();
  }
  forget_memory();
  c10::StorageImpl::release_resources();
}

void LazyStorage::forget_memory() {
  if (!memory_) return;
  if (runtime::in_bad_fork()) {
    // A thread of the parent may have held the allocator's mutex, and CUDA's would make an event.
    (void)memory_.unsafeReleaseStorageImpl();
    return;
  }
  runtime::note_free(device().index(), counted_);
  counted_ = 0;
  memory_ = c10::Storage();
}

void LazyStorage::set_memory(c10::Storage memory) {
  forget_memory();
  memory_ = std::move(memory);
  counted_ = memory_.nbytes();
  runtime::note_alloc(device().index(), counted_);
  set_data_ptr_noswap({memory_.mutable_data(), nullptr, &keep, device()});
}

c10::Storage LazyStorage::take_memory(size_t nbytes) {
  c10::Storage taken = memory_;
  forget_memory();
  set_data_ptr_noswap(reserved(nbytes, device()));
  set_nbytes(nbytes);
  return taken;
}

void check_contents(const LazyStorage& storage) {
  if (storage.poison == nullptr) return;
  ACC_FAIL("[acc] this tensor has no valid contents: ", storage.poison->message,
           " Give all of it new contents (copy_, load_state_dict) or make it again before using "
           "it.");
}

void refuse_absurd(size_t nbytes, c10::DeviceIndex device) {
  static auto& totals = *new std::array<std::atomic<size_t>, base::env::kMaxHostDevices>{};
  std::atomic<size_t>& total = totals.at(static_cast<size_t>(device));
  if (nbytes <= total.load(std::memory_order_relaxed)) return;
  runtime::Backend& backend = runtime::backend();
  const size_t memory = backend.properties(device).total_memory;
  // The host may promise more than it has, as long as not all of it is touched.
  const size_t limit = backend.alias_type() == c10::kCPU ? 2 * memory : memory;
  total.store(limit, std::memory_order_relaxed);
  constexpr size_t kMiB = size_t{1} << 20;
  TORCH_CHECK_WITH(OutOfMemoryError, nbytes <= limit, "[acc] out of memory: tried to allocate ",
                   nbytes / kMiB, " MiB, and acc:", static_cast<int>(device), " has ",
                   memory / kMiB, " MiB in all. Use a smaller size or batch.");
}

c10::intrusive_ptr<LazyStorage> make_storage(size_t nbytes, c10::DeviceIndex device) {
  static c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return c10::make_intrusive<LazyStorage>(
      c10::SymInt(static_cast<int64_t>(nbytes)),
      reserved(nbytes, c10::Device(c10::DeviceType::PrivateUse1, device)), allocator, true);
}

at::Tensor make_tensor(c10::intrusive_ptr<LazyStorage> storage, c10::ScalarType dtype,
                       c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void copy_flags(const at::Tensor& like, const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (tensor.is_conj() != like.is_conj()) impl->_set_conj(like.is_conj());
  if (tensor.is_neg() != like.is_neg()) impl->_set_neg(like.is_neg());
}

void register_storage() { c10::SetStorageImplCreate(c10::DeviceType::PrivateUse1, &create); }

}  // namespace acc::record
