#include "csrc/aten/geometry.h"

#include <ATen/EmptyTensor.h>

#include "csrc/runtime/backend.h"

namespace acc::aten {

at::Tensor geometry_only(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::DeviceType type = runtime::backend().alias_type();
  const c10::Device device(type,
                           type == c10::kCPU ? c10::DeviceIndex(-1) : tensor.device().index());
  const size_t nbytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                       static_cast<size_t>(tensor.storage_offset()));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(nbytes)),
      c10::DataPtr(nullptr, device), nullptr, false);
  at::Tensor made = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(type == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return made;
}

}  // namespace acc::aten
