#include "lazy/exec/runner.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/host_heap.h"
#include "csrc/runtime/memory.h"
#include "csrc/runtime/on_device.h"
#include "kernels/library/aten_call.h"
#include "lazy/exec/kernels.h"
#include "lazy/exec/profile.h"
#include "lazy/graph/words.h"
#include "lazy/plan/trial.h"

namespace acc::exec {
namespace {

using base::count;
using base::Counter;
using plan::Place;

// A result that the operator makes: which buffer takes it.
struct Result {
  uint32_t stack;  // position on the result stack
  int32_t item;    // position in the list there; -1: no list
  const int64_t* word;
};

// A step of a plan: one operator of ATen's, or launches of a kernel.
struct PreparedStep {
  std::optional<library::AtenCall> call;
  std::vector<Result> results;
  std::optional<KernelCall> kernel;
};

// What a plan needs at run time beyond pure data. Made at the first run.
struct Prepared {
  std::vector<library::Slot> slots;
  std::vector<PreparedStep> steps;
  void* arena = nullptr;  // where the slots of arena buffers point into
};

// One arena per device, shared by all plans, as large as the largest has needed.
struct Arena {
  c10::DataPtr memory;
  uint64_t bytes = 0;
};
// Each is guarded by the mutex of its device.
Arena& arena_of(c10::DeviceIndex device) {
  static auto& arenas = *new std::array<Arena, base::env::kMaxHostDevices>;
  return arenas.at(static_cast<size_t>(device));
}

std::atomic<bool> timing{false};

// Takes the time of a run's steps: for the schedule, when the user wants to know, and for the trial
// of the plan's kernels while there is one.
class StepClock {
 public:
  StepClock(plan::Plan& plan, plan::Schedule& schedule, c10::DeviceIndex device)
      : plan_(plan), schedule_(schedule), device_(device) {
    if (!times_steps() && plan.trial == nullptr) return;
    seconds_.resize(schedule_.steps.size());
    start();
  }

  // The step is over; the time of the next begins.
  void step(size_t index) {
    if (seconds_.empty()) return;
    const Clock::time_point begin = last_;
    start();
    seconds_[index] = std::chrono::duration<double>(last_ - begin).count();
  }

  // So is the run. `whole`: all of its steps were taken.
  void end(bool whole) {
    if (seconds_.empty() || !whole) return;
    if (plan_.trial != nullptr && !plan_.trial->decided()) plan_.trial->note(seconds_);
    if (!times_steps()) return;
    schedule_.seconds.resize(seconds_.size(), std::numeric_limits<double>::infinity());
    for (size_t i = 0; i < seconds_.size(); ++i) {
      schedule_.seconds[i] = std::min(schedule_.seconds[i], seconds_[i]);
    }
    ++schedule_.timed_runs;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void start() {
    runtime::backend().synchronize(device_);
    last_ = Clock::now();
  }

  plan::Plan& plan_;
  plan::Schedule& schedule_;
  const c10::DeviceIndex device_;
  std::vector<double> seconds_;
  Clock::time_point last_;
};

c10::Storage allocate(uint64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(bytes)),
                      runtime::backend().allocator(), true);
}

std::vector<Result> results_of(const plan::Plan& plan, const graph::Node& node) {
  std::vector<Result> results;
  const int64_t* word = plan.program.words.data() + node.outputs;
  uint32_t position = 0;
  const auto add = [&](int32_t item) {
    if (graph::tag_of(*word) == graph::Tag::kTensor) results.push_back({position, item, word});
    word += graph::item_words(word);
  };
  for (const graph::Return& result : node.op->returns) {
    if (result.alias < 0 && result.list) {
      const auto items = static_cast<int32_t>(graph::count_of(*word++));
      for (int32_t i = 0; i < items; ++i) add(i);
    } else if (result.alias < 0) {
      add(-1);
    }
    ++position;
  }
  return results;
}

std::shared_ptr<Prepared> prepare(const plan::Plan& plan, const plan::Schedule& schedule,
                                  c10::Device device) {
  auto prepared = std::make_shared<Prepared>();
  for (const graph::Buffer& buffer : plan.program.buffers) {
    prepared->slots.push_back(library::make_slot(
        buffer.kind == graph::BufferKind::kHost ? c10::Device(c10::kCPU) : device));
  }
  prepared->steps.reserve(schedule.steps.size());
  for (const plan::Step& step : schedule.steps) {
    PreparedStep& made = prepared->steps.emplace_back();
    if (step.kernel != plan::kNoKernel) {
      made.kernel.emplace(plan, step, prepared->slots);
      continue;
    }
    const graph::Node& node = plan.program.nodes[step.nodes[0]];
    std::vector<Result> results = results_of(plan, node);
    const bool into = results.size() == 1 && node.op->out_handle != nullptr &&
                      schedule.places[static_cast<size_t>(results[0].word[1])] != Place::kAdopted;
    if (!into) made.results = std::move(results);
    made.call.emplace(plan.program, node, prepared->slots, device, into);
  }
  return prepared;
}

// Whether the memory is what the promised geometry describes: the stride of a dimension of one
// element does not matter.
bool as_promised(const at::Tensor& tensor, const graph::TensorWords& promised) {
  if (tensor.storage_offset() != 0 || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.sizes().size() != promised.strides.size()) return false;
  for (size_t d = 0; d < promised.strides.size(); ++d) {
    if (tensor.sizes()[d] != 1 && tensor.strides()[d] != promised.strides[d]) return false;
  }
  return true;
}

// What a run holds beside its inputs, for the memory statistics of the host. On CUDA the allocator
// counts.
class Held {
 public:
  Held(c10::DeviceIndex device, size_t buffers)
      : device_(device), bytes_(runtime::backend().alias_type() == c10::kCPU ? buffers + 1 : 0) {}
  Held(Held&& other) noexcept : device_(other.device_), bytes_(std::exchange(other.bytes_, {})) {}
  Held& operator=(Held&&) = delete;
  ~Held() {
    for (size_t i = 0; i < bytes_.size(); ++i) give(i);
  }

  void take(size_t buffer, size_t bytes) {
    if (bytes_.empty() || bytes == 0) return;
    give(buffer);
    runtime::note_alloc(device_, bytes);
    bytes_[buffer] = bytes;
  }
  void take_arena(size_t bytes) { take(bytes_.size() - 1, bytes); }
  void give(size_t buffer) {
    if (bytes_.empty() || bytes_[buffer] == 0) return;
    runtime::note_free(device_, std::exchange(bytes_[buffer], 0));
  }

 private:
  c10::DeviceIndex device_;
  std::vector<size_t> bytes_;  // per buffer, and the arena
};

class Run {
 public:
  Run(const plan::Plan& plan, const plan::Schedule& schedule, Prepared& prepared,
      c10::DeviceIndex index, std::vector<Given>& given)
      : plan_(plan),
        schedule_(schedule),
        prepared_(prepared),
        device_(runtime::backend().alias_type(),
                runtime::backend().alias_type() == c10::kCPU ? c10::DeviceIndex(-1) : index),
        memory_(plan.program.buffers.size()),
        held_(index, plan.program.buffers.size()) {
    place_arena(index);
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].memory) continue;
      memory_[i] = std::move(given[i].memory);
      const auto offset = static_cast<size_t>(given[i].byte_offset);
      library::point(prepared_.slots[i], static_cast<char*>(memory_[i].mutable_data()) + offset,
                     memory_[i].nbytes() - std::min(offset, memory_[i].nbytes()));
    }
  }

  // `called` is set when the operator is about to run.
  void step(size_t index, std::span<const int64_t> values, bool* called) {
    const plan::Step& step = schedule_.steps[index];
    PreparedStep& prepared = prepared_.steps[index];
    for (const uint32_t buffer : step.allocate) {
      own(buffer, allocate(plan_.program.buffers[buffer].nbytes));
    }
    for (const plan::Reuse& reuse : step.reuse) take_over(reuse);
    *called = true;
    if (prepared.kernel.has_value()) {
      prepared.kernel->run(values);
    } else {
      call(prepared, values);
    }
    for (const uint32_t buffer : step.release) release(buffer);
  }

  // Of the operator that a step calls; null for a kernel.
  const torch::jit::Stack* arguments(size_t index) const {
    const PreparedStep& step = prepared_.steps[index];
    return step.call.has_value() ? &step.call->arguments() : nullptr;
  }

  // Does not run a step, whose results nobody wants any more. `touched`: by a later step.
  void leave_out(size_t index, const std::vector<bool>& touched) {
    const plan::Step& step = schedule_.steps[index];
    for (const uint32_t buffer : step.allocate) {
      if (touched[buffer]) own(buffer, allocate(plan_.program.buffers[buffer].nbytes));
    }
    for (const plan::Reuse& reuse : step.reuse) {
      if (!touched[reuse.buffer]) continue;
      own(reuse.buffer, allocate(plan_.program.buffers[reuse.buffer].nbytes));
    }
    for (const uint32_t buffer : step.release) release(buffer);
  }

  std::vector<c10::Storage> outputs() const {
    std::vector<c10::Storage> outputs(memory_.size());
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (plan_.outputs[i]) outputs[i] = memory_[i];
    }
    return outputs;
  }

  std::vector<c10::Storage> take_outputs() {
    std::vector<c10::Storage> outputs(memory_.size());
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!plan_.outputs[i]) continue;
      outputs[i] = std::move(memory_[i]);
      held_.give(i);  // who takes it counts it
    }
    return outputs;
  }

 private:
  void call(const PreparedStep& prepared, std::span<const int64_t> values) {
    torch::jit::Stack stack = prepared.call->run(values);
    for (const Result& result : prepared.results) {
      const c10::IValue& value = stack[result.stack];
      adopt(result, result.item < 0
                        ? value.toTensor()
                        : value.toListRef()[static_cast<size_t>(result.item)].toTensor());
    }
  }

  void place_arena(c10::DeviceIndex index) {
    if (schedule_.arena_bytes == 0) return;
    held_.take_arena(schedule_.arena_bytes);
    Arena& arena = arena_of(index);
    if (arena.bytes < schedule_.arena_bytes) {
      arena.memory.clear();
      arena.bytes = 0;
      arena.memory = runtime::backend().allocator()->allocate(schedule_.arena_bytes);
      arena.bytes = schedule_.arena_bytes;
    }
    if (prepared_.arena == arena.memory.get()) return;
    prepared_.arena = arena.memory.get();
    for (size_t i = 0; i < schedule_.places.size(); ++i) {
      if (schedule_.places[i] != Place::kArena) continue;
      library::point(prepared_.slots[i], static_cast<char*>(prepared_.arena) + schedule_.offsets[i],
                     plan_.program.buffers[i].nbytes);
    }
  }

  void own(uint32_t buffer, c10::Storage memory) {
    library::point(prepared_.slots[buffer], memory.mutable_data(), memory.nbytes());
    held_.take(buffer, memory.nbytes());
    memory_[buffer] = std::move(memory);
  }

  // What an operator returned may be another size than it promised, or known to somebody else.
  void take_over(const plan::Reuse& reuse) {
    const uint64_t bytes = plan_.program.buffers[reuse.buffer].nbytes;
    const c10::Storage& memory = memory_[reuse.of];
    if (memory.use_count() != 1 || memory.nbytes() != bytes) {
      return own(reuse.buffer, allocate(bytes));
    }
    held_.give(reuse.of);
    own(reuse.buffer, memory);
  }

  void release(uint32_t buffer) {
    memory_[buffer] = c10::Storage();
    held_.give(buffer);
  }

  // The operator's memory becomes the buffer's, unless its layout is another one than the user was
  // told, or it is the memory of an operand.
  void adopt(const Result& result, const at::Tensor& tensor) {
    const graph::TensorWords promised = graph::read_tensor(result.word);
    const uint32_t buffer = promised.buffer;
    if (!tensor.defined()) {
      ACC_CHECK(plan_.program.buffers[buffer].nbytes == 0 || !plan_.outputs[buffer]);
      return;
    }
    const c10::IntArrayRef sizes(promised.sizes.data(), promised.sizes.size());
    // A workspace is promised empty: only its kernel knows how large it is.
    const bool workspace = c10::multiply_integers(sizes) == 0;
    library::check_promise(tensor, static_cast<c10::ScalarType>(promised.dtype),
                           workspace ? tensor.sizes() : sizes);
    if (as_promised(tensor, promised) && !is_slot(tensor.storage())) {
      own(buffer, tensor.storage());
      return;
    }
    count(Counter::StrideCopies);
    own(buffer, allocate(plan_.program.buffers[buffer].nbytes));
    library::alias(result.word, prepared_.slots[buffer]).copy_(tensor);
  }

  bool is_slot(const c10::Storage& storage) const {
    // Slots are pointed at memory that others own, so they are the ones without an allocator and
    // with a deleter that does nothing.
    return storage.allocator() == nullptr && !storage.resizable();
  }

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  Prepared& prepared_;
  const c10::Device device_;
  std::vector<c10::Storage> memory_;
  Held held_;
};

}  // namespace

// A run from its first step to its last, in as many goes as it takes.
class Stopped {
 public:
  Stopped(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given, Places places)
      : plan_(plan),
        schedule_(choose_schedule(plan)),
        device_(device),
        given_(std::move(given)),
        places_(std::move(places)) {}

  Outcome go_on(std::span<const int64_t> values) {
    // Kernels run as in a fresh thread: below autograd, and outside the modes and transforms of
    // whoever caused the flush.
    c10::impl::ForceDispatchKeyGuard clean(
        c10::default_included_set,
        c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    runtime::AmbientScope ambient;
    const runtime::OnDevice on_device(device_);
    // What operators allocate here lives as long as what the plan allocates: both from one place.
    runtime::HostHeapScope heap(runtime::backend().alias_type() == c10::kCPU);
    const size_t begin = step_;
    size_t tried_again = kNever;  // the step that found no memory the last time
    Outcome outcome;
    for (bool once_more = true; once_more;) {
      once_more = false;
      try {
        advance(values, ambient);
        outcome.error = nullptr;
      } catch (...) {
        outcome.error = std::current_exception();
        if (may_repeat() && runtime::is_out_of_memory(outcome.error)) {
          once_more = tried_again != step_;
          tried_again = step_;
          if (once_more) runtime::backend().empty_cache();
          if (!once_more) outcome.stopped = std::make_shared<Stopped>(std::move(*this));
        }
      }
    }
    outcome.schedule = &schedule_;
    outcome.failed_step = outcome.stopped == nullptr ? step_ : outcome.stopped->step_;
    count(Counter::Steps, outcome.failed_step - begin);
    if (outcome.stopped == nullptr) outcome.outputs = take_outputs();
    return outcome;
  }

  Outcome give_up(std::exception_ptr error) {
    return {&schedule_, take_outputs(), step_, std::move(error), nullptr};
  }

  void leave_out_unneeded(std::vector<bool> needed) {
    needed_ = std::move(needed);
    touched_.assign(plan_.program.buffers.size(), false);
    for (size_t step = step_; step < schedule_.steps.size(); ++step) {
      if (!is_needed(step)) continue;
      for (const graph::Use& use : uses_of(step)) touched_[use.buffer] = true;
    }
  }

  std::vector<c10::Storage> complete_outputs() const {
    if (!run_.has_value()) return std::vector<c10::Storage>(plan_.program.buffers.size());
    std::vector<c10::Storage> outputs = run_->outputs();
    for (size_t step = step_; step < schedule_.steps.size(); ++step) {
      for (const graph::Use& use : uses_of(step)) {
        if (use.writes) outputs[use.buffer] = c10::Storage();
      }
    }
    return outputs;
  }

  size_t next_step() const { return step_; }
  const plan::Schedule& schedule() const { return schedule_; }

 private:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  void advance(std::span<const int64_t> values, runtime::AmbientScope& ambient) {
    Profile profile(plan_, schedule_, places_);
    if (!run_.has_value()) {
      const c10::Device alias_device(
          runtime::backend().alias_type(),
          runtime::backend().alias_type() == c10::kCPU ? c10::DeviceIndex(-1) : device_);
      if (schedule_.prepared == nullptr) {
        schedule_.prepared = prepare(plan_, schedule_, alias_device);
      }
      run_.emplace(plan_, schedule_, *static_cast<Prepared*>(schedule_.prepared.get()), device_,
                   given_);
    }
    StepClock clock(plan_, schedule_, device_);
    const bool whole = step_ == 0 && needed_.empty();
    for (; step_ < schedule_.steps.size(); ++step_) {
      called_ = false;
      if (!is_needed(step_)) {
        run_->leave_out(step_, touched_);
        continue;
      }
      ambient.set(plan_.program.nodes[schedule_.steps[step_].nodes[0]].ambient);
      if (profile.observed()) profile.begin_step(step_, run_->arguments(step_));
      run_->step(step_, values, &called_);
      clock.step(step_);
    }
    clock.end(whole);
  }

  bool is_needed(size_t step) const {
    return needed_.empty() || std::ranges::any_of(schedule_.steps[step].nodes,
                                                  [this](uint32_t node) { return needed_[node]; });
  }

  std::vector<graph::Use> uses_of(size_t step) const {
    return plan::uses(plan_, schedule_.steps[step]);
  }

  // Whether the step that failed can be run as if it never had been.
  bool may_repeat() const {
    if (!run_.has_value() || !called_) return true;
    const plan::Step& step = schedule_.steps[step_];
    const graph::Op& op = *plan_.program.nodes[step.nodes[0]].op;
    return !op.writes && op.removable && step.reuse.empty();
  }

  std::vector<c10::Storage> take_outputs() {
    return run_.has_value() ? run_->take_outputs()
                            : std::vector<c10::Storage>(plan_.program.buffers.size());
  }

  plan::Plan& plan_;
  plan::Schedule& schedule_;
  c10::DeviceIndex device_;
  std::vector<Given> given_;
  Places places_;
  std::optional<Run> run_;
  size_t step_ = 0;
  std::vector<bool> needed_;   // per node; empty: all are
  std::vector<bool> touched_;  // per buffer, by a needed step that did not run
  bool called_ = false;        // the operator of the step was called
};

Outcome run(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
            std::span<const int64_t> values, Places places) {
  return Stopped(plan, device, std::move(given), std::move(places)).go_on(values);
}

Outcome resume(Stopped& stopped, std::span<const int64_t> values, std::vector<bool> needed) {
  stopped.leave_out_unneeded(std::move(needed));
  return stopped.go_on(values);
}

std::vector<c10::Storage> complete_outputs(const Stopped& stopped) {
  return stopped.complete_outputs();
}

size_t next_step(const Stopped& stopped) { return stopped.next_step(); }

const plan::Schedule& schedule(const Stopped& stopped) { return stopped.schedule(); }

Outcome give_up(Stopped& stopped, std::exception_ptr error) {
  return stopped.give_up(std::move(error));
}

void time_steps(bool on) { timing.store(on, std::memory_order_relaxed); }

bool times_steps() { return timing.load(std::memory_order_relaxed); }

void release_arena(c10::DeviceIndex device) { arena_of(device) = Arena(); }

}  // namespace acc::exec
