#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "lazy/record/storage.h"

// Making tensors. A new tensor is a storage without contents: nothing is recorded and no memory is
// taken until something is written.
namespace acc::aten {
namespace {

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  runtime::note_use();
  const int count = runtime::backend().device_count();
  const int index = device.has_value() && device->has_index() ? device->index()
                                                              : runtime::backend().current_device();
  TORCH_CHECK(index >= 0 && index < count, "acc:", index, " is not there: this process has ", count,
              count == 1 ? " acc device." : " acc devices.",
              " Choose an index below that, or set ACC_HOST_DEVICES on the host executor.");
  return static_cast<c10::DeviceIndex>(index);
}

c10::ScalarType dtype_of(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "acc has no tensors of layout ",
              *layout, ". Make them on the CPU, or use dense tensors.");
  TORCH_CHECK(!pin_memory.value_or(false),
              "only CPU tensors can be pinned; got device acc. Leave pin_memory out.");
}

// With deterministic algorithms PyTorch fills new memory with NaN (or the largest integer).
at::Tensor uninitialized(at::Tensor tensor) {
  if (!at::globalContext().deterministicAlgorithms() ||
      !at::globalContext().deterministicFillUninitializedMemory() || tensor.numel() == 0) {
    return tensor;
  }
  at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const c10::DeviceIndex index = index_of(device);
  const c10::ScalarType type = dtype_of(dtype);
  at::detail::check_size_nonnegative(sizes);
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(type));
  record::refuse_absurd(nbytes, index);
  at::Tensor tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(record::make_storage(nbytes, index)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(type));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (sizes.size() != 1 || sizes[0] != 0) impl->set_sizes_contiguous(sizes);
  if (memory_format.has_value() && *memory_format != c10::MemoryFormat::Contiguous) {
    impl->empty_tensor_restride(*memory_format);
  }
  return uninitialized(std::move(tensor));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  at::detail::check_size_nonnegative(sizes);
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape: ", sizes,
              " and ", strides);
  const c10::DeviceIndex index = index_of(device);
  const c10::ScalarType type = dtype_of(dtype);
  const size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));
  record::refuse_absurd(nbytes, index);
  return uninitialized(
      record::make_tensor(record::make_storage(nbytes, index), type, sizes, strides));
}

// A tensor of zeros that autograd passes around and that never has memory; views of it are made as
// of any other. Operators see its dispatch key and never its storage.
at::Tensor efficient_zeros(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                           std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  at::detail::check_size_nonnegative(sizes);
  const c10::ScalarType type = dtype_of(dtype);
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(type));
  static const auto& without_memory = *new std::shared_ptr<const record::Poison>(
      std::make_shared<record::Poison>(record::Poison{"it stands for zeros without memory."}));
  auto storage = record::make_storage(nbytes, index_of(device));
  storage->poison = without_memory;
  at::Tensor tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
}

}  // namespace
}  // namespace acc::aten
