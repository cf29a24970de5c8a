#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/aten/record_kernel.h"
#include "lazy/record/recorder.h"

// Views: another geometry over the same storage. Nothing is recorded; an operator that uses the
// view records its geometry.
namespace acc::aten {
namespace {

at::Tensor view_of(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                   int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return view;
}

// A view with a node of autograd, whose operators name its place.
at::Tensor differentiable_view_of(const at::Tensor& self, c10::IntArrayRef sizes,
                                  c10::IntArrayRef strides, int64_t offset) {
  if (self.requires_grad() && c10::GradMode::is_enabled() && !runs_at_once()) {
    record::note_view(self.get_device());
  }
  return view_of(self, sizes, strides, offset);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> storage_offset) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const int64_t offset =
      storage_offset.has_value() ? storage_offset->expect_int() : self.storage_offset();
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape: ", sizes,
              " and ", strides);
  TORCH_CHECK(
      std::ranges::all_of(strides, [](int64_t s) { return s >= 0; }),
      "as_strided: Negative strides are not supported at the moment, got strides: ", strides);
  TORCH_CHECK(offset >= 0, "as_strided: storage offset must not be negative, got ", offset);
  const auto itemsize = self.dtype().itemsize();
  const size_t needed =
      at::detail::computeStorageNbytes(sizes, strides, itemsize, static_cast<size_t>(offset));
  TORCH_CHECK(needed <= self.storage().nbytes() ||
                  std::ranges::any_of(sizes, [](int64_t s) { return s == 0; }),
              "setStorage: sizes ", sizes, ", strides ", strides, ", storage offset ", offset,
              ", and itemsize ", itemsize, " requiring a storage size of ", needed,
              " are out of bounds for storage of size ", self.storage().nbytes());
  return differentiable_view_of(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  const auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return differentiable_view_of(self, sizes, *strides, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return differentiable_view_of(self, C10_AS_INTARRAYREF_SLOW(size),
                                C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

at::Tensor alias(const at::Tensor& self) {
  return view_of(self, self.sizes(), self.strides(), self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  const int64_t dims = self.dim();
  const int64_t d = at::maybe_wrap_dim(dimension, dims, /*wrap_scalar=*/true);
  const int64_t length = dims == 0 ? 1 : self.size(d);
  TORCH_CHECK(size >= 0, "size is ", size, " but must be >= 0");
  TORCH_CHECK(size <= length, "maximum size for tensor at dimension ", d, " is ", length,
              " but size is ", size);
  TORCH_CHECK(step > 0, "step is ", step, " but must be > 0");
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  sizes.push_back(size);
  strides.push_back(dims == 0 ? 1 : strides[static_cast<size_t>(d)]);
  if (dims > 0) {
    sizes[static_cast<size_t>(d)] = (length - size) / step + 1;
    strides[static_cast<size_t>(d)] *= step;
  }
  return differentiable_view_of(self, sizes, strides, self.storage_offset());
}

// The rules are those of ATen's kernel; it is called on tensors that have the geometry and no data.
at::Tensor view_dtype(const at::Tensor& self, c10::ScalarType dtype) {
  const at::Tensor meta =
      at::detail::empty_strided_meta(self.sizes(), self.strides(), self.scalar_type());
  record::copy_flags(self, meta);
  const auto from = static_cast<int64_t>(self.dtype().itemsize());
  const auto to = static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor viewed = meta.view(dtype);
  TORCH_CHECK(self.storage_offset() * from % to == 0, "self.storage_offset() must be divisible by ",
              to / from, " to view ", self.scalar_type(), " as ", dtype,
              " (different element sizes), but got ", self.storage_offset());
  at::Tensor view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                               self.key_set(), c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(self.storage_offset() * from / to);
  impl->set_sizes_and_strides(viewed.sizes(), viewed.strides());
  return view;
}

at::Tensor view_as_components(const at::Tensor& self) {
  TORCH_CHECK(self.is_complex(), "view_as_real is only supported for complex tensors");
  TORCH_CHECK(!self.is_conj(),
              "view_as_real doesn't work on unresolved conjugated tensors. To resolve the "
              "conjugate tensor so you can view it as real, use self.resolve_conj(); however, be "
              "warned that the resulting tensor will NOT alias the original.");
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  for (int64_t& stride : strides) stride *= 2;
  sizes.push_back(2);
  strides.push_back(1);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
      c10::scalarTypeToTypeMeta(c10::toRealValueType(self.scalar_type())));
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(self.storage_offset() * 2);
  impl->set_sizes_and_strides(sizes, strides);
  return view;
}

at::Tensor view_as_complex(const at::Tensor& self) {
  const at::Tensor meta =
      at::detail::empty_strided_meta(self.sizes(), self.strides(), self.scalar_type());
  const at::Tensor viewed = at::view_as_complex(meta);
  TORCH_CHECK(self.storage_offset() % 2 == 0, "Tensor must have a storage_offset divisible by 2");
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), viewed.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(self.storage_offset() / 2);
  impl->set_sizes_and_strides(viewed.sizes(), viewed.strides());
  return view;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("alias", &alias);
  m.impl("unfold", &unfold);
  m.impl("view.dtype", &view_dtype);
  m.impl("view_as_real", &view_as_components);
  m.impl("view_as_complex", &view_as_complex);
}

}  // namespace
}  // namespace acc::aten
