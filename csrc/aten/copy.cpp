#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "csrc/aten/fallback.h"
#include "csrc/aten/record_kernel.h"
#include "csrc/aten/schema.h"
#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/on_device.h"
#include "lazy/record/overlap.h"
#include "lazy/record/recorder.h"
#include "lazy/session/session.h"

// Copies in every direction, and reading a number back.
namespace acc::aten {
namespace {

using record::FlushReason;
using runtime::on_acc;

// acc to acc: one node. `aten::copy_` itself is decomposed by PyTorch into this very function, so
// the recorder is called for it by name.
void record_copy(const at::Tensor& destination, const at::Tensor& source) {
  static const c10::OperatorHandle handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  static const graph::Op* const op = make_op(handle);
  torch::jit::Stack stack;
  torch::jit::push(stack, destination, source, false);
  record_or_run(*op, handle, &stack);
}

// Whether a copy would write what is there: DistributedDataParallel copies a buffer that travels
// alone onto itself.
bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         record::overlap_status(a, b) == at::MemOverlapStatus::Full;
}

// From the host, or from a CUDA tensor of the program's own, into a tensor that nothing can have
// touched yet: a copy from the host waits for no work of the device, and all that is submitted
// later waits for the copy. False for other tensors.
bool receive(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const c10::DeviceIndex device = destination.device().index();
  runtime::Backend& backend = runtime::backend();
  const c10::Stream work = backend.default_stream(device);
  const c10::Stream copies = source.is_cpu() ? backend.copy_stream(device) : work;
  const auto memory = session::new_memory(destination, copies);
  if (!memory.has_value()) return false;
  // A CUDA tensor of the program's own is made, and freed, in the order of its stream.
  if (!source.is_cpu()) runtime::follow_current_stream(device);
  {
    const runtime::OnDevice on_device(copies);
    session::with_memory(device, "[aten::copy_] failed", /*may_repeat=*/true, [&] {
      runtime::await_device(device, [&] { memory->copy_(source, non_blocking); });
    });
  }
  if (!source.is_cpu()) runtime::let_current_stream_follow(device);
  if (copies == work) return true;
  backend.block(*backend.mark(copies, /*timing=*/false, nullptr), work);
  return true;
}

// From the host. The source may be changed by its owner as soon as this returns (pinned and with
// `non_blocking`, as soon as he knows that the copy is over), so it is read now: into the
// destination where nothing can touch that, else into a tensor of its own whose copy is recorded.
void copy_from_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (receive(source, destination, non_blocking)) return;
  // As the source lies, unless its elements share memory or leave gaps. Not at::empty_strided: with
  // deterministic algorithms that fills what it makes.
  const bool dense = source.is_non_overlapping_and_dense();
  const c10::DimVector contiguous = c10::contiguous_strides(source.sizes());
  const c10::IntArrayRef strides = dense ? source.strides() : c10::IntArrayRef(contiguous);
  const size_t bytes =
      at::detail::computeStorageNbytes(source.sizes(), strides, source.dtype().itemsize());
  const at::Tensor staged =
      record::make_tensor(record::make_storage(bytes, destination.device().index()),
                          source.scalar_type(), source.sizes(), strides);
  ACC_CHECK(receive(source, staged, non_blocking));
  record_copy(destination, staged);
}

void copy_contents(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  if (on_acc(self) && on_acc(destination)) {
    if (self.device() == destination.device()) {
      if (!same_elements(destination, self)) record_copy(destination, self);
    } else {
      const at::Tensor to = session::alias(destination, FlushReason::kFallback);
      const at::Tensor from = session::alias(self, FlushReason::kRead);
      const runtime::OnDevice of_destination(destination.device().index());
      const runtime::OnDevice of_source(self.device().index());
      to.copy_(from);
    }
  } else if (on_acc(destination)) {
    TORCH_CHECK(self.layout() == c10::kStrided, "acc has no tensors of layout ", self.layout(),
                ". Make it dense with .to_dense() first.");
    copy_from_host(self, destination, non_blocking);
  } else if (destination.is_cpu()) {
    const at::Tensor from =
        non_blocking ? session::alias(self, FlushReason::kRead) : session::await(self);
    const c10::DeviceIndex device = self.device().index();
    const runtime::OnDevice of_source(device);
    session::with_memory(device, "[aten::copy_] failed", /*may_repeat=*/true, [&] {
      runtime::await_device(device, [&] { destination.copy_(from, non_blocking); });
    });
  } else {
    // To a tensor of the program's own: in the order of its stream.
    const at::Tensor from = session::alias(self, FlushReason::kRead);
    runtime::let_current_stream_follow(self.device().index());
    destination.copy_(from, non_blocking);
    runtime::follow_current_stream(self.device().index());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  // New contents for all of a tensor whose contents a failure took: it is usable again.
  auto poison =
      on_acc(destination) && !self.is_alias_of(destination) ? session::cure(destination) : nullptr;
  try {
    copy_contents(self, destination, non_blocking);
  } catch (...) {
    if (poison != nullptr) session::poison_again(destination, std::move(poison));
    throw;
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::Tensor from = session::await(self);
  const c10::DeviceIndex device = self.device().index();
  const runtime::OnDevice of_source(device);
  return runtime::await_device(device, [&] { return at::_local_scalar_dense(from); });
}

// As copies of parts: FSDP2 takes apart what it gathers so, and its Meta kernel knows no `out`.
void split_with_sizes_copy_out(const at::Tensor& self, c10::IntArrayRef sizes, int64_t dim,
                               at::TensorList out) {
  const std::vector<at::Tensor> parts = at::split_with_sizes(self, sizes, dim);
  TORCH_CHECK(out.size() == parts.size(), "split_with_sizes_copy: Expected ", parts.size(),
              " tensors as out, got ", out.size(), ".");
  for (size_t i = 0; i < parts.size(); ++i) {
    TORCH_CHECK(out[i].scalar_type() == self.scalar_type(), "Expected out tensor to have dtype ",
                self.dtype(), ", but got ", out[i].dtype(), " instead");
    at::native::resize_output(out[i], parts[i].sizes());
    out[i].copy_(parts[i]);
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("split_with_sizes_copy.out", &split_with_sizes_copy_out);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// Copies handle lazily conjugated and negated tensors themselves; PyTorch's fallback for them would
// clone, which copies again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace acc::aten
