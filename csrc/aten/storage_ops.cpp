#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/ResizeCommon.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/event.h"
#include "csrc/runtime/fork.h"
#include "lazy/record/recorder.h"
#include "lazy/session/session.h"

// Operators on the storage behind a tensor: set_, resize_, and which tensors may exchange theirs.
namespace acc::aten {
namespace {

using record::LazyStorage;

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt storage_offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  const int64_t offset = storage_offset.expect_int();
  TORCH_CHECK(source.device() == self.device(), "set_: the storage is on ", source.device(),
              ", the tensor on ", self.device(), ". Give it a storage of the same device.");
  LazyStorage& storage = *static_cast<LazyStorage*>(source.unsafeGetStorageImpl());
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  if (strides.empty() && !sizes.empty()) {
    strides.assign(sizes.size(), 1);
    for (size_t d = sizes.size() - 1; d > 0; --d) {
      strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
    }
  }
  TORCH_CHECK(sizes.size() == strides.size(), "unequal size length (", sizes.size(),
              ") and stride length (", strides.size(), ")");
  const size_t needed = at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(),
                                                         static_cast<size_t>(offset));
  if (needed > storage.nbytes()) {
    TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
    session::resize_storage(storage, needed);
  }
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements =
      static_cast<int64_t>(source.nbytes() / std::max<size_t>(self.dtype().itemsize(), 1));
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(elements)}),
                     c10::SymIntArrayRef({c10::SymInt(1)}));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, c10::Storage(record::make_storage(0, self.device().index())), 0,
                     c10::SymIntArrayRef({c10::SymInt(0)}), c10::SymIntArrayRef({c10::SymInt(1)}));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> memory_format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  at::detail::check_size_nonnegative(sizes);
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, self.dtype().itemsize(), static_cast<size_t>(self.storage_offset()));
  LazyStorage& storage = *record::storage_of(self);
  const size_t before = storage.nbytes();
  if (self.sizes() != sizes && needed > before) session::resize_storage(storage, needed);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (memory_format.has_value()) {
    TORCH_CHECK(*memory_format != c10::MemoryFormat::Preserve, "Unsupported memory format",
                *memory_format);
    impl->empty_tensor_restride(*memory_format);
  }
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
  }
  return self;
}

// Module.to exchanges the data of a Parameter instead of the Parameter itself when this holds, so
// that optimizers and tied weights keep theirs.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    const auto keys = tensor.key_set();
    return keys.has(c10::DispatchKey::PrivateUse1) || keys.has(c10::DispatchKey::CPU);
  };
  return dense(self) && dense(from);
}

// For what the program submits itself, to a stream of its own and with the address it was told.
// Recorded work needs no word: a storage lives until the steps that use it have run.
void record_stream(at::Tensor& self, c10::Stream stream) {
  runtime::note_use();
  const c10::DeviceIndex device = self.device().index();
  if (stream == runtime::backend().default_stream(device)) return;
  LazyStorage& storage = *record::storage_of(self);
  const auto lock = record::recorder(device).lock();
  if (storage.pinned && storage.has_memory()) {
    runtime::let_use(stream, storage.memory(), self.storage());
    return;
  }
  std::vector<c10::Stream>& known = storage.streams;
  if (std::find(known.begin(), known.end(), stream) == known.end()) known.push_back(stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("resize_", &resize);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace acc::aten
