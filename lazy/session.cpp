#include "lazy/session.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/event.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/hooks_table.h"
#include "lazy/exec/runner.h"
#include "lazy/graph/print.h"
#include "lazy/plan/cache.h"
#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"
#include "lazy/record/source.h"

namespace acc::session {
namespace {

using base::count;
using base::Counter;
using record::FlushReason;
using record::LazyStorage;
using record::Recorder;
using record::Trace;

constexpr std::array kReasonCounters{
    Counter::FlushExplicit, Counter::FlushRead,          Counter::FlushStep,  Counter::FlushLoader,
    Counter::FlushFallback, Counter::FlushDataDependent, Counter::FlushCap,   Counter::FlushEvent,
    Counter::FlushResize,   Counter::FlushPointer,       Counter::FlushEager, Counter::FlushExit};

// A plan may be expected by a recorder when the cache drops it, so the cache shares ownership.
using Cached = std::shared_ptr<plan::Plan>;

class Session {
 public:
  static Session& get() {
    // Never destroyed: tensors may be freed after static destructors have begun.
    static Session* const session = new Session;
    return *session;
  }

  void flush(Recorder& recorder, FlushReason reason);
  std::string last_plan(c10::DeviceIndex device);
  void drop_plans(c10::DeviceIndex device);

 private:
  struct Device {
    Cached expected;  // what the recorder compares with
    Cached last;
    plan::LruCache<Cached> plans{base::env::plan_cache_bytes(),
                                 [](Cached&, uint64_t) { count(Counter::PlansEvicted); }};
  };
  Cached find_or_build(Device& device, Trace& trace, const std::vector<bool>& alive);
  Cached widen(Device& device, const Cached& plan, const std::vector<bool>& alive);
  void finish(const plan::Plan& plan, Trace& trace, exec::Outcome& outcome);

  // Guarded by the mutex of the device's recorder.
  std::array<Device, base::env::kMaxHostDevices> devices_;
};

bool covers(const std::vector<bool>& outputs, const std::vector<bool>& alive) {
  for (size_t i = 0; i < alive.size(); ++i) {
    if (alive[i] && !outputs[i]) return false;
  }
  return true;
}

std::vector<bool> alive_buffers(const Trace& trace) {
  std::vector<bool> alive(trace.entries.size());
  for (size_t i = 0; i < alive.size(); ++i) {
    const record::Entry& entry = trace.entries[i];
    alive[i] = entry.kind == graph::BufferKind::kFresh && !entry.storage.expired();
  }
  return alive;
}

// Whether the buffers that overlap do so as the plan knows it. Everything else was compared while
// the trace followed the plan.
bool overlaps_as_planned(const plan::Plan& plan, const Trace& trace) {
  for (const uint32_t buffer : plan.overlapping) {
    const record::Entry& entry = trace.entries[buffer];
    if (entry.byte_offset - trace.entries[entry.group].byte_offset !=
        plan.graph.buffers[buffer].group_offset) {
      return false;
    }
  }
  return true;
}

// ACC_DUMP: what a new plan was made of, or what is left of it.
void dump(const plan::Plan& plan) {
  if (base::env::dump() == base::env::Dump::None) return;
  graph::Graph shown = plan.graph;
  if (base::env::dump() == base::env::Dump::Plan) {
    shown.nodes.clear();
    for (const plan::Step& step : plan.steps) shown.nodes.push_back(plan.graph.nodes[step.node]);
  }
  std::fputs(graph::print(shown).c_str(), stderr);
}

Cached Session::find_or_build(Device& device, Trace& trace, const std::vector<bool>& alive) {
  if (trace.followed != nullptr) {
    if (overlaps_as_planned(*device.expected, trace)) {
      count(Counter::PlanFollows);
      return device.expected;
    }
    trace.graph = device.expected->graph;
    for (size_t i = 0; i < trace.entries.size(); ++i) {
      graph::Buffer& buffer = trace.graph.buffers[i];
      const record::Entry& entry = trace.entries[i];
      if (buffer.written) {
        buffer.group_offset = entry.byte_offset - trace.entries[entry.group].byte_offset;
      }
    }
  }
  const base::Hash128 key = graph::hash(trace.graph);
  if (Cached* found = device.plans.find(
          key, [&](const Cached& plan) { return graph::same(plan->graph, trace.graph); })) {
    count(Counter::PlanHits);
    return *found;
  }
  Cached plan = plan::build(std::move(trace.graph), key, alive);
  dump(*plan);
  device.plans.insert(key, std::make_unique<Cached>(plan), plan->bytes());
  return plan;
}

// A buffer that no run so far kept is kept now: the plan is made again, once, and from then on
// keeps it always.
Cached Session::widen(Device& device, const Cached& plan, const std::vector<bool>& alive) {
  count(Counter::PlansWidened);
  std::vector<bool> outputs = plan->outputs;
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i] = outputs[i] || alive[i];
  Cached wider = plan::build(plan->graph, plan->key, std::move(outputs));
  wider->next = plan->next;
  if (Cached* cached =
          device.plans.find(plan->key, [&](const Cached& other) { return other == plan; })) {
    *cached = wider;
  }
  return wider;
}

// Throws `message` with the type that the operator threw, so that user code catches what it would
// catch in eager mode.
[[noreturn]] void rethrow_as(const std::exception_ptr& error, const std::string& message) {
  const c10::SourceLocation where{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  try {
    std::rethrow_exception(error);
  } catch (const c10::IndexError&) {
    throw c10::IndexError(where, message);
  } catch (const c10::ValueError&) {
    throw c10::ValueError(where, message);
  } catch (const c10::TypeError&) {
    throw c10::TypeError(where, message);
  } catch (const c10::NotImplementedError&) {
    throw c10::NotImplementedError(where, message);
  } catch (const c10::OutOfMemoryError&) {
    throw c10::OutOfMemoryError(where, message);
  } catch (const std::exception&) {
    throw base::Error(message);
  }
}

// Gives the storages what was made; on a failure poisons what was not.
void Session::finish(const plan::Plan& plan, Trace& trace, exec::Outcome& outcome) {
  for (size_t i = 0; i < trace.entries.size(); ++i) {
    if (!outcome.outputs[i]) continue;
    if (const auto storage = trace.entries[i].storage.lock()) {
      storage->set_memory(std::move(outcome.outputs[i]));
      count(Counter::Materialisations);
    }
  }
  if (outcome.error == nullptr) return;

  count(Counter::Errors);
  const graph::Node& failed = plan.graph.nodes[plan.steps[outcome.failed_step].node];
  std::string what;
  try {
    std::rethrow_exception(outcome.error);
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  auto poison = std::make_shared<record::Poison>();
  poison->message = base::concat("[", failed.op->name, "] failed",
                                 record::source_text(failed.source), ": ", what);
  // Everything that the steps which did not run were to write.
  for (size_t step = outcome.failed_step; step < plan.steps.size(); ++step) {
    for (const graph::Use& use : graph::uses(plan.graph, plan.graph.nodes[plan.steps[step].node])) {
      if (!use.writes) continue;
      const uint32_t first = plan.graph.buffers[use.buffer].group;
      if (const auto storage = trace.entries[first].storage.lock()) storage->poison = poison;
    }
  }
  rethrow_as(outcome.error, poison->message);
}

void Session::flush(Recorder& recorder, FlushReason reason) {
  runtime::LockWithoutGil lock(recorder.mutex());
  if (recorder.pending() == 0) return;
  Trace trace = recorder.take();
  count(Counter::Flushes);
  count(kReasonCounters[static_cast<size_t>(reason)]);

  Device& device = devices_[static_cast<size_t>(recorder.device())];
  const std::vector<bool> alive = alive_buffers(trace);
  Cached plan = find_or_build(device, trace, alive);
  if (!covers(plan->outputs, alive)) plan = widen(device, plan, alive);

  std::vector<exec::Given> given(trace.entries.size());
  for (size_t i = 0; i < given.size(); ++i) {
    given[i] = {std::move(trace.entries[i].memory), trace.entries[i].byte_offset};
  }
  exec::Outcome outcome = exec::run(*plan, recorder.device(), std::move(given), trace.values);
  runtime::events_submitted(recorder.device());

  if (device.last != nullptr) device.last->next = plan;
  device.last = plan;
  device.expected = plan->next.lock();
  recorder.expect(device.expected == nullptr ? nullptr : &device.expected->graph);
  finish(*plan, trace, outcome);
  recorder.recycle(std::move(trace));
}

std::string Session::last_plan(c10::DeviceIndex index) {
  Recorder& recorder = record::recorder(index);
  runtime::LockWithoutGil lock(recorder.mutex());
  const Device& device = devices_[static_cast<size_t>(index)];
  return device.last == nullptr ? "" : graph::print(device.last->graph);
}

void Session::drop_plans(c10::DeviceIndex index) {
  Recorder& recorder = record::recorder(index);
  runtime::LockWithoutGil lock(recorder.mutex());
  recorder.stop_expecting();
  Device& device = devices_[static_cast<size_t>(index)];
  device.expected.reset();
  device.last.reset();
  device.plans.clear();
  exec::release_arena(index);
}

std::atomic<bool> stopped{false};

}  // namespace

void flush(c10::DeviceIndex device, FlushReason reason) {
  if (stopped.load(std::memory_order_relaxed)) return;
  runtime::GilRelease release;
  if (device >= 0) return Session::get().flush(record::recorder(device), reason);
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    Session::get().flush(record::recorder(static_cast<c10::DeviceIndex>(i)), reason);
  }
}

void start() {
  runtime::FlushHooks hooks;
  hooks.flush = [](c10::DeviceIndex device, runtime::Cause cause) {
    constexpr std::array kReasons{FlushReason::kExplicit, FlushReason::kRead, FlushReason::kEvent};
    flush(device, kReasons[static_cast<size_t>(cause)]);
  };
  hooks.pending = [](c10::DeviceIndex device) noexcept {
    return record::recorder(device).pending() > 0;
  };
  hooks.resize_storage = [](c10::StorageImpl& storage, size_t nbytes) {
    resize_storage(static_cast<LazyStorage&>(storage), nbytes);
  };
  hooks.release_cached = [](c10::DeviceIndex device) {
    runtime::LockWithoutGil lock(record::recorder(device).mutex());
    exec::release_arena(device);
  };
  runtime::install_flush_hooks(hooks);
}

void stop() {
  if (stopped.load()) return;
  try {
    flush(-1, FlushReason::kExit);
  } catch (const std::exception&) {
    // Nobody is left to read what the failed step was to make.
  }
  stopped.store(true);
}

void materialise(LazyStorage& storage) {
  if (storage.poison != nullptr) {
    ACC_FAIL("[acc] this tensor has no valid contents: ", storage.poison->message,
             " Make the tensor again before using it.");
  }
  if (storage.has_memory()) return;
  storage.set_memory(c10::Storage(c10::Storage::use_byte_size_t(),
                                  c10::SymInt(static_cast<int64_t>(storage.nbytes())),
                                  runtime::backend().allocator(), true));
}

at::Tensor alias(const at::Tensor& tensor, FlushReason reason) {
  runtime::note_use();
  LazyStorage& storage = *record::storage_of(tensor);
  Recorder& recorder = record::recorder(tensor.device().index());
  c10::Storage memory;
  {
    runtime::LockWithoutGil lock(recorder.mutex());
    if (!recorder.knows(storage)) {
      materialise(storage);
      memory = storage.memory();
    }
  }
  if (!memory) {
    flush(tensor.device().index(), reason);
    runtime::LockWithoutGil lock(recorder.mutex());
    materialise(storage);
    memory = storage.memory();
  }
  const auto key = memory.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor result = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(memory), c10::DispatchKeySet(key), tensor.dtype());
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return result;
}

void poison(const at::Tensor& tensor, const std::string& message) {
  auto reason = std::make_shared<record::Poison>();
  reason->message = message;
  Recorder& recorder = record::recorder(tensor.device().index());
  runtime::LockWithoutGil lock(recorder.mutex());
  record::storage_of(tensor)->poison = std::move(reason);
}

void resize_storage(LazyStorage& storage, size_t nbytes) {
  const size_t old_bytes = storage.nbytes();
  if (nbytes == old_bytes) return;
  const c10::DeviceIndex device = storage.device().index();
  Recorder& recorder = record::recorder(device);
  {
    runtime::LockWithoutGil lock(recorder.mutex());
    const bool without_contents = !recorder.knows(storage) && !storage.has_memory();
    if (nbytes == 0 || old_bytes == 0 || without_contents) {
      recorder.detach(storage, nbytes);
      storage.poison.reset();
      return;
    }
  }
  flush(device, FlushReason::kResize);
  runtime::LockWithoutGil lock(recorder.mutex());
  materialise(storage);
  const c10::Storage old = storage.take_memory(nbytes);
  materialise(storage);
  runtime::backend().copy(storage.memory().mutable_data(), old.data(), std::min(old_bytes, nbytes),
                          device);
}

std::string last_plan(c10::DeviceIndex device) { return Session::get().last_plan(device); }

void release_memory(c10::DeviceIndex device) {
  flush(device, FlushReason::kExplicit);
  Session::get().drop_plans(device);
}

}  // namespace acc::session
