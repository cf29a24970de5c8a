#include <c10/util/Logging.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/aten/fallback.h"
#include "csrc/aten/record_kernel.h"
#include "csrc/aten/schema.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backward.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"
#include "lazy/record/call.h"
#include "lazy/record/recorder.h"
#include "lazy/record/types.h"
#include "lazy/session/session.h"

// How the dispatcher reaches us: one boxed recorder for nearly every operator, a fallback for the
// rest.
namespace acc::aten {
namespace {

class RecordKernel final : public c10::OperatorKernel {
 public:
  explicit RecordKernel(const graph::Op* op) : op_(*op) {
    // Not counted on the CPU either, nor by PyTorch's own process groups.
    if (op->name.starts_with("aten::_fused_") || op->name.starts_with("aten::_amp_") ||
        op->communicates) {
      return;
    }
    for (size_t i = 0; i < op->arguments.size(); ++i) {
      const graph::Argument& argument = op->arguments[i];
      if (argument.writes && argument.list == graph::ListOf::kTensor) written_lists_.push_back(i);
    }
  }
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet,
                  torch::jit::Stack* stack) {
    if (op_.evaluates != nullptr &&
        !(*stack)[stack->size() - op_.arguments.size() + op_.training].toBool()) {
      return record_or_run(*op_.evaluates, handle, stack);
    }
    if (written_lists_.empty()) return record_or_run(op_, handle, stack);
    // PyTorch leaves it to the kernels to count these writes, by which autograd knows that a saved
    // tensor is no longer what it was.
    c10::SmallVector<c10::IValue, 4> lists;
    const size_t base = stack->size() - op_.arguments.size();
    for (const size_t i : written_lists_) lists.push_back((*stack)[base + i]);
    record_or_run(op_, handle, stack);
    for (const c10::IValue& list : lists) {
      for (const c10::IValue& tensor : list.toListRef()) {
        tensor.toTensor().unsafeGetTensorImpl()->bump_version();
      }
    }
  }

 private:
  const graph::Op& op_;
  std::vector<size_t> written_lists_;
};

void register_recorded(torch::Library& library, const c10::OperatorHandle& handle) {
  // The name without its namespace, which the library brings.
  c10::OperatorName name = handle.operator_name();
  name.name = name.name.substr(name.name.find("::") + 2);
  library.impl(c10::toString(name).c_str(),
               torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(
                   std::make_unique<RecordKernel>(make_op(handle)))));
}

void refuse_sparse(const c10::OperatorHandle& handle, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "acc has no sparse tensors (", handle.schema().name(),
      "). For embeddings use "
      "nn.Embedding(sparse=False) or nn.EmbeddingBag(sparse=False); otherwise compute on the CPU.");
}

// A thread's own state costs a call to find; so this is asked first.
std::atomic<int> eager_threads{0};
thread_local bool eager_here = false;

}  // namespace

bool run_eagerly(bool on) {
  runtime::keep_backward_in_this_thread();
  const bool before = std::exchange(eager_here, on);
  eager_threads.fetch_add(static_cast<int>(on) - static_cast<int>(before),
                          std::memory_order_relaxed);
  return before;
}

bool runs_at_once() {
  // Python still runs once the session has ended: functions at exit, finalizers, threads.
  return base::env::mode() == base::env::Mode::Eager || session::has_ended() ||
         (eager_threads.load(std::memory_order_relaxed) != 0 && eager_here);
}

void record_or_run(const graph::Op& op, const c10::OperatorHandle& handle,
                   torch::jit::Stack* stack) {
  runtime::keep_backward_in_this_thread();
  if (runs_at_once()) return run_now(handle, stack);
  runtime::note_use();
  const c10::DeviceIndex device = record::device_of(*stack, op.arguments.size());
  if (device < 0) return run_now(handle, stack);
  record::Recorder& recorder = record::recorder(device);
  using record::Recorded;
  Recorded recorded = Recorded::kSuspended;
  while (recorded == Recorded::kSuspended || recorded == Recorded::kInterrupted) {
    if (recorded == Recorded::kInterrupted) runtime::handle_signals();
    if (recorder.suspended() && !session::settle(device)) break;
    // Before the call is recorded: were it pending when this throws, a user who repeats it would
    // have it twice.
    if (recorder.pending() >= static_cast<size_t>(base::env::max_pending()) ||
        record::left_behind(device) >= base::env::max_pending_bytes()) {
      session::flush(device, record::FlushReason::kCap);
    }
    recorded = recorder.record(op, handle, stack);
  }
  if (recorded != Recorded::kYes) {
    const record::Doubt doubt = record::take_doubt();
    run_now(handle, stack);
    return record::dismiss(doubt);
  }
  if (base::env::mode() == base::env::Mode::NoFuse)
    session::flush(device, record::FlushReason::kEager);
}

namespace {

void register_all_recorded() {
  // Libraries register for as long as they live: for ever.
  static auto* const aten = new torch::Library(torch::Library::IMPL, "aten",
                                               c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static auto* const own = new torch::Library(torch::Library::IMPL, "acc",
                                              c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool from_aten = name.name.starts_with("aten::");
    if (!from_aten && !name.name.starts_with("acc::")) continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle.has_value() || !is_recordable(*handle)) continue;
    register_recorded(from_aten ? *aten : *own, *handle);
  }
}

}  // namespace

// Which these are depends on the kernels that the device below has.
void register_recorded_ops() { runtime::when_chosen(&register_all_recorded); }

void register_fallbacks() {
  // For ever, as what is recorded: to take one back writes to the tables of all operators.
  const auto set = [](c10::DispatchKey key, torch::CppFunction function) {
    static auto* const libraries = new std::vector<std::unique_ptr<torch::Library>>;
    libraries->push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
    libraries->back()->fallback(std::move(function));
  };
  using torch::CppFunction;
  set(c10::DispatchKey::PrivateUse1, CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto key :
       {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1}) {
    set(key, CppFunction::makeFromBoxedFunction<&refuse_sparse>());
  }
  // PyTorch registers no autograd fallback for PrivateUse1; without one, custom operators fail.
  // This is what it has for other devices: an operator without a derivative (a collective) warns in
  // backward instead of failing there.
  set(c10::DispatchKey::AutogradPrivateUse1,
      torch::autograd::basicAutogradNotImplementedFallback());
  set(c10::DispatchKey::AutocastPrivateUse1, CppFunction::makeFallthrough());
}

}  // namespace acc::aten
