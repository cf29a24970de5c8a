#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "lazy/record/storage.h"

// Tensors as a captured step sees them: where they begin, how they are laid out, what they hold.
namespace acc::capture {

// A tensor that the function takes or returns, without its storage.
struct Geometry {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  bool conj = false;
  bool neg = false;
};

Geometry geometry_of(const at::Tensor& tensor);

// The tensor of such a geometry, but at `offset`, over `storage`.
at::Tensor tensor_over(c10::intrusive_ptr<record::LazyStorage> storage, const Geometry& geometry,
                       int64_t offset);

// Where a tensor begins in its storage, in bytes.
int64_t first_byte(const at::Tensor& tensor);

using WeakStorage = c10::weak_intrusive_ptr<record::LazyStorage>;
WeakStorage weak(record::LazyStorage* storage);
inline WeakStorage no_storage() { return WeakStorage(c10::intrusive_ptr<record::LazyStorage>()); }

// A copy on the device of what is there, or (pageable) on the host. By who has the lock of the
// recorder.
c10::Storage copy_of(const c10::Storage& memory, c10::DeviceIndex device);

// Whether both hold the same bytes; on a GPU they come to the host for that.
bool same_contents(const c10::Storage& a, const c10::Storage& b);

}  // namespace acc::capture
