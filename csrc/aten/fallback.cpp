#include "csrc/aten/fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "csrc/aten/schema.h"
#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/generator.h"
#include "csrc/runtime/on_device.h"
#include "lazy/graph/op_table.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"
#include "lazy/record/watch.h"
#include "lazy/session/session.h"
#include "lazy/session/strict.h"

namespace acc::aten {
namespace {

using record::FlushReason;
using runtime::on_acc;

c10::Device alias_device(c10::DeviceIndex index) {
  const c10::DeviceType type = runtime::backend().alias_type();
  return {type, type == c10::kCPU ? c10::DeviceIndex(-1) : index};
}

// One call: which alias stands for which acc tensor.
class DirectCall {
 public:
  DirectCall(const c10::OperatorHandle& handle, torch::jit::Stack* stack)
      : handle_(handle),
        schema_(handle.schema()),
        stack_(stack),
        base_(stack->size() - schema_.arguments().size()) {
    find_device();
  }

  void run(FlushReason reason) {
    reason_ = reason;
    if (tensor_device_ >= 0) session::refuse_cut(tensor_device_, reason, schema_.name());
    const record::RunsAtOnce at_once(schema_.name());
    torch::jit::Stack call;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      check_cpu((*stack_)[base_ + i], argument);
      call.push_back(lower((*stack_)[base_ + i], *argument.type()));
    }
    // What is the program's own is made, read and freed in the order of its stream.
    if (with_own_) runtime::follow_current_stream(device_);
    {
      const runtime::OnDevice on_device(device_);
      c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                               c10::autocast_dispatch_keyset);
      runtime::await_program_settings();
      const torch::jit::Stack arguments = std::move(call);
      session::with_memory(device_, "[" + schema_.name() + "] failed", may_repeat(), [&] {
        call = arguments;
        runtime::await_device(device_, [&] { handle_.callBoxed(call); });
      });
    }
    if (with_own_) runtime::let_current_stream_follow(device_);
    for (const Pair& pair : pairs_) follow(pair);
    torch::jit::drop(*stack_, schema_.arguments().size());
    for (size_t i = 0; i < call.size(); ++i) {
      stack_->push_back(graph::table::returns_to_cpu(schema_.name(), i) ? call[i] : raise(call[i]));
    }
  }

 private:
  struct Pair {
    at::Tensor alias;
    at::Tensor tensor;
  };

  // Whether a call that found no memory can be made again as if it never had been: as a step of a
  // plan, but ATen's operators move the generator that they are given.
  bool may_repeat() const {
    const std::string& name = schema_.name();
    return !graph::table::must_run(name) && !schema_.returns().empty() && !schema_.is_mutable() &&
           (name.starts_with("acc::") || !handle_.hasTag(at::Tag::nondeterministic_seeded));
  }

  void find_device() {
    for (size_t i = base_; i < stack_->size(); ++i) {
      const c10::IValue& value = (*stack_)[i];
      if (value.isTensor() && on_acc(value.toTensor())) note(value.toTensor().device());
      if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
        if (device_ < 0) device_ = value.toDevice().index();
      }
      if (!value.isList()) continue;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && on_acc(item.toTensor())) note(item.toTensor().device());
      }
    }
    if (device_ < 0) device_ = static_cast<c10::DeviceIndex>(runtime::backend().current_device());
  }

  void note(c10::Device device) {
    TORCH_CHECK(tensor_device_ < 0 || tensor_device_ == device.index(),
                "Expected all tensors to be on the same device, but found at least two devices, "
                "acc:",
                static_cast<int>(tensor_device_), " and acc:", static_cast<int>(device.index()),
                "! (in ", schema_.name(), "). Move them to one device first.");
    device_ = tensor_device_ = device.index();
  }

  // Throws for a CPU tensor with dimensions, or one that is written, beside acc ones: on a host
  // ATen would take it. Of calls that are recorded Recorder::record checks the same.
  void check_cpu(const c10::IValue& value, const c10::Argument& argument) const {
    const std::string& name = schema_.name();
    if (tensor_device_ < 0 || !(name.starts_with("aten::") || name.starts_with("acc::")) ||
        graph::table::takes_cpu_tensor(schema_.name(), argument.name()) ||
        graph::table::reads_on_cpu(schema_.name(), argument.name())) {
      return;
    }
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const auto check = [&](const c10::IValue& item) {
      if (!item.isTensor() || !item.toTensor().defined()) return;
      const at::Tensor& tensor = item.toTensor();
      TORCH_CHECK(!tensor.is_cpu() || (tensor.dim() == 0 && !written),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "acc:",
                  static_cast<int>(tensor_device_), " and cpu! (when checking argument '",
                  argument.name(), "' of ", schema_.name(),
                  "). Move it with .to(\"acc:", static_cast<int>(tensor_device_), "\") first.");
    };
    check(value);
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) check(item);
    }
  }

  at::Tensor lower(const at::Tensor& tensor) {
    if (!on_acc(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.device().is_cpu() ||
                      tensor.device().type() == runtime::backend().alias_type() ||
                      tensor.device().is_meta(),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "acc:",
                  static_cast<int>(device_), " and ", tensor.device(), "! (in ", schema_.name(),
                  "). Move it with .to(\"acc\") first.");
      with_own_ |= tensor.defined() && tensor.is_cuda();
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, "acc has no sparse tensors (in ", schema_.name(),
                "): this one has layout ", tensor.layout(),
                ". For embeddings use nn.Embedding(sparse=False); otherwise move "
                "the tensor to the CPU with .cpu().");
    for (const Pair& pair : pairs_) {
      if (pair.tensor.is_same(tensor)) return pair.alias;
    }
    at::Tensor alias = session::alias(tensor, reason_);
    pairs_.push_back({alias, tensor});
    return alias;
  }

  c10::IValue lower(const c10::IValue& value, const c10::Type& type) {
    if (value.isTensor()) return lower(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      return alias_device(device_);
    }
    if (value.isGenerator() ||
        (value.isNone() && type.str().find("Generator") != std::string::npos)) {
      return generator(value);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& item : value.toListRef()) list.push_back(lower(item.toTensor()));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& item : value.toListRef()) {
        list.push_back(item.isTensor() ? std::optional<at::Tensor>(lower(item.toTensor()))
                                       : std::nullopt);
      }
      return list;
    }
    return value;
  }

  // The operator draws from a generator of the backend's device that starts where ours stands, so
  // that torch.manual_seed and saved states govern it.
  c10::IValue generator(const c10::IValue& given) {
    if (!handle_.hasTag(at::Tag::nondeterministic_seeded)) return given;
    std::optional<at::Generator> own;
    if (given.isGenerator()) own = given.toGenerator();
    // One draw moves our stream by one block of four numbers, whatever the operator consumes: its
    // own generator is seeded afresh each time.
    const auto [seed, offset] = runtime::generator_or_default(own, device_).reserve(4);
    at::Generator drawn = runtime::on_host() ? at::detail::createCPUGenerator()
                                             : at::detail::getCUDAHooks().getNewGenerator(device_);
    std::lock_guard lock(drawn.mutex());
    drawn.set_current_seed(seed ^ (offset * 0x9e3779b97f4a7c15ULL));
    return drawn;
  }

  // An out= argument was resized, or marked as conjugated, by the operator: the acc tensor follows.
  void follow(const Pair& pair) {
    const at::Tensor& tensor = pair.tensor;
    record::copy_flags(pair.alias, tensor);
    if (pair.alias.sizes() == tensor.sizes() && pair.alias.strides() == tensor.strides()) return;
    record::LazyStorage& storage = *record::storage_of(tensor);
    const auto lock = record::recorder(device_).lock();
    storage.set_nbytes(pair.alias.storage().nbytes());
    storage.set_memory(pair.alias.storage());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(pair.alias.sizes(), pair.alias.strides());
  }

  at::Tensor raise(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const Pair& pair : pairs_) {
      if (pair.alias.is_same(result)) return pair.tensor;
    }
    if (result.device().type() != runtime::backend().alias_type()) return result;
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided, "acc has no tensors of layout ", result.layout(), " (",
        schema_.name(),
        "). For embeddings use nn.Embedding(sparse=False); otherwise compute on the CPU.");
    TORCH_CHECK_NOT_IMPLEMENTED(!result.is_quantized(), "acc has no quantized tensors (",
                                schema_.name(), "). Quantize on the CPU: tensor.cpu().");
    for (const Pair& pair : pairs_) {
      if (!pair.alias.is_alias_of(result)) continue;
      // A view of an argument stays one.
      at::Tensor view = record::make_tensor(
          c10::intrusive_ptr<record::LazyStorage>::reclaim_copy(record::storage_of(pair.tensor)),
          result.scalar_type(), result.sizes(), result.strides());
      view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
      record::copy_flags(result, view);
      return view;
    }
    return wrap(result, device_);
  }

  c10::IValue raise(const c10::IValue& value) {
    if (value.isTensor()) return raise(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& item : value.toListRef()) list.push_back(raise(item.toTensor()));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& handle_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const size_t base_;
  c10::DeviceIndex device_ = -1;
  c10::DeviceIndex tensor_device_ = -1;
  bool with_own_ = false;  // CUDA tensors of the program's own are among the arguments
  FlushReason reason_ = FlushReason::kFallback;
  std::vector<Pair> pairs_;
};

}  // namespace

at::Tensor wrap(const at::Tensor& result, c10::DeviceIndex device) {
  const at::Tensor plain =
      result.storage_offset() == 0 && !result.is_conj() && !result.is_neg()
          ? result
          : result.resolve_conj().resolve_neg().clone(at::MemoryFormat::Preserve);
  auto storage = record::make_storage(plain.storage().nbytes(), device);
  if (plain.storage().nbytes() > 0) storage->set_memory(plain.storage());
  return record::make_tensor(std::move(storage), plain.scalar_type(), plain.sizes(),
                             plain.strides());
}

void run_now(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  base::count(base::Counter::RunNow);
  DirectCall(handle, stack)
      .run(handle.hasTag(at::Tag::dynamic_output_shape) ? FlushReason::kDataDependent
                                                        : FlushReason::kFallback);
}

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  base::count_keyed("fallback", handle.schema().name());
  run_now(handle, stack);
}

}  // namespace acc::aten
