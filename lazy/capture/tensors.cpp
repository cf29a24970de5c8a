#include "lazy/capture/tensors.h"

#include <cstring>
#include <utility>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/on_device.h"
#include "lazy/session/session.h"

namespace acc::capture {

using record::LazyStorage;

Geometry geometry_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(),    tensor.sizes().vec(), tensor.strides().vec(),
          tensor.storage_offset(), tensor.is_conj(),     tensor.is_neg()};
}

at::Tensor tensor_over(c10::intrusive_ptr<LazyStorage> storage, const Geometry& geometry,
                       int64_t offset) {
  at::Tensor tensor =
      record::make_tensor(std::move(storage), geometry.dtype, geometry.sizes, geometry.strides);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (geometry.conj) impl->_set_conj(true);
  if (geometry.neg) impl->_set_neg(true);
  return tensor;
}

int64_t first_byte(const at::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<int64_t>(tensor.dtype().itemsize());
}

WeakStorage weak(LazyStorage* storage) {
  c10::raw::weak_intrusive_ptr::incref(storage);
  return WeakStorage::reclaim(storage);
}

c10::Storage copy_of(const c10::Storage& memory, c10::DeviceIndex device) {
  runtime::Backend& backend = runtime::backend();
  c10::Storage copy = session::allocate(memory.nbytes(), backend.default_stream(device));
  const runtime::OnDevice on_device(device);
  backend.copy(copy.mutable_data(), memory.data(), memory.nbytes(), device);
  return copy;
}

bool same_contents(const c10::Storage& a, const c10::Storage& b) {
  if (a.nbytes() != b.nbytes()) return false;
  if (a.nbytes() == 0) return true;
  const auto on_host = [](const c10::Storage& memory) {
    const auto key = memory.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    at::Tensor bytes = at::detail::make_tensor_base<c10::TensorImpl>(
        c10::Storage(memory), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(c10::kByte));
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(memory.nbytes())});
    return bytes.to(c10::kCPU);
  };
  const at::Tensor left = on_host(a);
  const at::Tensor right = on_host(b);
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace acc::capture
