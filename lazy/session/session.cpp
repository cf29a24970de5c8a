#include "lazy/session/session.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/event.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"
#include "lazy/exec/kernels.h"
#include "lazy/exec/runner.h"
#include "lazy/graph/graph.h"
#include "lazy/passes/dce.h"
#include "lazy/record/recorder.h"
#include "lazy/record/source.h"
#include "lazy/record/storage.h"
#include "lazy/record/watch.h"
#include "lazy/session/explain.h"
#include "lazy/session/failure.h"
#include "lazy/session/planning.h"
#include "lazy/session/reasons.h"
#include "lazy/session/replay.h"
#include "lazy/session/session_impl.h"
#include "lazy/session/strict.h"
#include "lazy/session/turn.h"
#include "lazy/session/verify.h"

namespace acc::session {

using base::count;
using base::Counter;
using record::FlushReason;
using record::LazyStorage;
using record::Recorder;
using record::Trace;

Session& Session::get() {
  // Never destroyed: tensors may be freed after static destructors have begun.
  static Session* const session = new Session;
  return *session;
}

void Session::find_or_build(Device& device, Work& work) {
  Trace& trace = work.trace;
  const bool after_cut = std::exchange(device.cut, false);
  if (trace.followed != nullptr) {
    if (overlaps_as_planned(*device.expected, trace)) {
      count(Counter::PlanFollows);
      work.plan = device.expected;
      // It is in use, and not the next to be dropped.
      device.plans.find(work.plan->key,
                        [&](const Cached& plan) { return plan == device.expected; });
      return;
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
    work.plan = *found;
    return;
  }
  RECORD_FUNCTION("acc: build a plan", c10::ArrayRef<const c10::IValue>());
  const base::CountedTime time(Counter::PlanUs);
  NewPlan made = explain(trace.graph, device.plans, device.expected.get());
  if (after_cut) made.why = Why::kRest;
  device.cut = made.why == Why::kChanged && is_cut(work.reason);
  note_new(device, work, std::move(made));
  work.plan = make_plan(std::move(trace.graph), key, alive_buffers(trace), {}, pass_observer());
  count(Counter::PlansBuilt);
  work.first = true;
  dump(*work.plan);
  device.plans.insert(key, std::make_unique<Cached>(work.plan), work.plan->bytes());
}

// Why there is a new plan.
void Session::note_new(Device& device, Work& work, NewPlan made) {
  made.device = static_cast<c10::DeviceIndex>(&device - devices_.data());
  made.reason = work.reason;
  made.submitted_at = work.place;
  work.news = std::move(made);
}

// The plan is made again: a buffer that no run so far kept is kept now, and from then on always, or
// it is to have its operators one by one.
Cached Session::renew(Device& device, const Cached& plan, const std::vector<bool>& alive) {
  RECORD_FUNCTION("acc: build a plan", c10::ArrayRef<const c10::IValue>());
  const base::CountedTime time(Counter::PlanUs);
  if (!plan->to_be_plain) count(Counter::PlansWidened);
  std::vector<bool> outputs = plan->outputs;
  for (size_t i = 0; i < alive.size(); ++i) outputs[i] = outputs[i] || alive[i];
  plan::Options wish = plan->options;
  wish.fuse = wish.fuse && !plan->to_be_plain;
  Cached wider = make_plan(plan->graph, plan->key, std::move(outputs), wish, pass_observer());
  count(Counter::PlansBuilt);
  const Cached next = plan->next.lock();
  wider->next = next == plan ? wider : next;  // a loop of one plan stays one
  if (Cached* cached =
          device.plans.find(plan->key, [&](const Cached& other) { return other == plan; })) {
    *cached = wider;
  }
  return wider;
}

// Sees to it that the plan keeps what the user can reach, and is as it is to be.
void Session::look_again(Device& device, Work& work, const Look& look) {
  const std::vector<bool> alive = alive_buffers(work.trace);
  if (!covers(work.plan->outputs, alive)) {
    NewPlan made = explain_kept(*work.plan, alive);
    work.plan = renew(device, work.plan, alive);
    if (!work.news.has_value()) note_new(device, work, std::move(made));
  } else if (work.plan->to_be_plain) {
    work.plan = renew(device, work.plan, alive);
  }
  if (look == nullptr) return;
  if (Cached other = look(work.trace, work.plan, alive)) work.plan = std::move(other);
}

static const graph::Graph& graph_of(const Trace& trace) {
  return trace.followed != nullptr ? *trace.followed : trace.graph;
}

// Gives the storages what was made.
static void hand_out(const Trace& trace, std::vector<exec::Output>& outputs) {
  for (exec::Output& output : outputs) {
    if (output.buffer >= trace.entries.size()) continue;
    const auto storage = trace.entries[output.buffer].storage.lock();
    if (!storage || storage->has_memory()) continue;
    storage->set_memory(std::move(output.memory));
    count(Counter::Materialisations);
  }
}

// What plans have captured, or are compared with, takes memory of the host, too.
void Session::count_captures(Device& device) {
  device.plans.measure(
      [](const Cached& plan) { return plan->bytes() + exec::captures_bytes(*plan); });
}

// What is complete is the user's already.
void Session::suspend(Recorder& recorder, Work work, exec::Outcome outcome) {
  Device& device = devices_[static_cast<size_t>(recorder.device())];
  std::vector<exec::Output> complete =
      exec::hand_over_complete(*outcome.stopped, alive_buffers(work.trace));
  device.results.remember(work.trace, outcome, complete);
  hand_out(work.trace, complete);
  recorder.suspend(work.trace, outcome.error == nullptr);
  device.suspended = std::make_unique<Suspended>(
      Suspended{std::move(work), std::move(outcome.stopped), outcome.error});
}

// The schedule of a plan whose kernels are chosen.
static const plan::Schedule& final_of(const plan::Plan& plan) {
  return plan.kernels.empty() ? plan.unfused : plan.fused;
}

// Ends a run. A failure poisons what was not, or suspends the work when it
// may go on later, and is thrown.
void Session::finish(Recorder& recorder, Work work, exec::Outcome outcome, bool tells) {
  const plan::Plan& plan = *work.runs;
  Device& device = devices_[static_cast<size_t>(recorder.device())];
  if (outcome.recaptured) count_captures(device);
  if (outcome.stopped != nullptr && outcome.error == nullptr) {
    return suspend(recorder, std::move(work), std::move(outcome));
  }
  if (outcome.stopped == nullptr) {
    runtime::events_submitted(recorder.device());
    if (work.reason != FlushReason::kIdle) {  // which is no part of what repeats
      if (device.last.plan != nullptr) device.last.plan->next = work.plan;
      device.last = {work.plan, work.runs == work.plan ? outcome.schedule : &final_of(*work.plan),
                     work.reason};
      device.expected = work.plan->next.lock();
    }
    if (exec::times_steps() &&
        (device.largest.plan == nullptr ||
         device.largest.plan->graph.nodes.size() <= work.plan->graph.nodes.size())) {
      device.largest = device.last;
    }
    recorder.expect(device.expected == nullptr ? nullptr : &device.expected->graph);
    device.results.remember(work.trace, outcome, outcome.outputs);
    hand_out(work.trace, outcome.outputs);
    device.room = std::move(outcome.room);
    if (outcome.error == nullptr) {
      recorder.recycle(std::move(work.trace));
      return;
    }
  }

  count(Counter::Errors);
  const plan::Schedule& schedule = *outcome.schedule;
  // Behind the last step, what ends a run may fail, too.
  const size_t failed_step = std::min(outcome.failed_step, schedule.steps.size() - 1);
  const graph::Node& failed = plan.program.nodes[schedule.steps[failed_step].nodes[0]];
  std::string message =
      base::concat(outcome.failed_before ? "what was under way before [" : "[", failed.op->name,
                   "] failed", work.first || failed.source == 0 ? "" : ", first recorded",
                   record::source_text(failed.source), ": ", runtime::text_of(outcome.error));
  const bool no_memory = runtime::is_out_of_memory(outcome.error);
  if (no_memory) message += memory_situation(plan, schedule, recorder.device(), outcome.given_back);
  if (outcome.stopped != nullptr) {
    work.told |= tells;
    suspend(recorder, std::move(work), outcome);
    message +=
        " Free tensors before the next operation (del, torch.acc.empty_cache()): the work then "
        "goes "
        "on at this operator, and nothing runs twice. If memory is still short then, what it was "
        "to write has no valid contents and says so when it is used.";
  } else {
    auto poison = std::make_shared<record::Poison>();
    poison->message = message;
    poison_rest(plan, schedule, work.trace, outcome.failed_step, poison);
    runtime::tell_failure(message,
                          undone_of(plan, schedule, outcome.failed_step, outcome.failed_before));
  }
  rethrow_as(outcome.error, no_memory, message);
}

namespace {

// Tells other threads that work is on its way while this one does it.
class Running {
 public:
  explicit Running(Recorder& recorder) : recorder_(recorder) { recorder.begin_run(); }
  ~Running() { recorder_.end_run(); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Recorder& recorder_;
};

}  // namespace

void Session::resume(Recorder& recorder, const MayBegin& may_begin) {
  const Running running(recorder);
  Device& device = devices_[static_cast<size_t>(recorder.device())];
  const std::unique_ptr<Suspended> suspended = std::move(device.suspended);
  recorder.unsuspend();
  Work& work = suspended->work;
  exec::Outcome outcome;
  try {
    runtime::follow_own_streams(recorder.device());
    // What the user gave up to free memory need not be made any more. What the passes added is
    // nobody's.
    const graph::Graph& program = work.runs->program;
    std::vector<bool> alive = alive_buffers(work.trace);
    alive.resize(program.buffers.size());
    outcome = exec::resume(*suspended->run, work.trace.values,
                           passes::eliminate_dead_code(program, alive), may_begin);
  } catch (...) {
    outcome = exec::give_up(*suspended->run, std::current_exception());
  }
  // Whoever submits for others what is idle has nobody to tell.
  finish(recorder, std::move(work), std::move(outcome), may_begin == nullptr);
}

bool Session::was_told(Recorder& recorder) const {
  const auto& suspended = devices_[static_cast<size_t>(recorder.device())].suspended;
  return suspended != nullptr && suspended->work.told;
}

void Session::give_up(Recorder& recorder) {
  Device& device = devices_[static_cast<size_t>(recorder.device())];
  const std::unique_ptr<Suspended> suspended = std::move(device.suspended);
  recorder.unsuspend();
  try {
    finish(recorder, std::move(suspended->work), exec::give_up(*suspended->run, suspended->error));
  } catch (const c10::OutOfMemoryError&) {
    // The user was told when memory ran out; now the tensors in question tell.
  }
}

void Session::settle(Recorder& recorder) {
  const auto lock = recorder.lock();
  if (!recorder.suspended()) return;
  const bool told = was_told(recorder);
  try {
    resume(recorder);
  } catch (const c10::OutOfMemoryError&) {
    if (!told) throw;
    if (recorder.suspended()) give_up(recorder);
  }
}

std::string Session::flush(Recorder& recorder, FlushReason reason, uint32_t place,
                           const MayBegin& may_begin) {
  std::unique_ptr<runtime::Marker> oldest;
  Submitted made;
  {
    const auto lock = recorder.lock();
    if (recorder.suspended()) resume(recorder, may_begin);
    if (recorder.pending() == 0) return "";
    made = submit(recorder, reason, place, nullptr, may_begin);
    if (reason == FlushReason::kStep || reason == FlushReason::kLoader) oldest = end_step(recorder);
  }
  if (oldest != nullptr) await(recorder, *oldest);
  return tell(std::move(made));
}

// Marks the end of a step. Returns the end of the one that has to be over before the next is
// recorded: were more in flight, whoever looks at the clock after so many steps would see less than
// their work.
std::unique_ptr<runtime::Marker> Session::end_step(Recorder& recorder) {
  runtime::Backend& backend = runtime::backend();
  auto& in_flight = devices_[static_cast<size_t>(recorder.device())].in_flight;
  in_flight.push_back(
      backend.mark(backend.default_stream(recorder.device()), /*timing=*/false, nullptr));
  if (in_flight.size() <= static_cast<size_t>(base::env::max_inflight())) return nullptr;
  std::unique_ptr<runtime::Marker> oldest = std::move(in_flight.front());
  in_flight.pop_front();
  return oldest;
}

void Session::await(Recorder& recorder, const runtime::Marker& end) {
  count(Counter::StepWaits);
  runtime::await_device(recorder.device(), [&] { runtime::backend().wait(end); });
}

std::string Session::last_work(Recorder& recorder) {
  const auto lock = recorder.lock();
  const Cached& plan = devices_[static_cast<size_t>(recorder.device())].last.plan;
  if (plan == nullptr) return "";
  const uint32_t source = plan->graph.nodes.front().source;
  return base::concat(" Submitted last: ", plan->graph.nodes.size(), " operators",
                      source == 0 ? "" : ", first recorded" + record::source_text(source), ".");
}

Submitted Session::submit(Recorder& recorder, FlushReason reason, uint32_t place, const Look& look,
                          const MayBegin& may_begin) {
  const Running running(recorder);
  Work work;
  work.trace = recorder.take();
  work.reason = reason;
  work.place = place;
  count(Counter::Flushes);
  count(counter_of(reason));

  Device& device = devices_[static_cast<size_t>(recorder.device())];
  // Asked now, since the graph goes into the plan, which may not come about.
  const std::vector<runtime::Undone> undone = undone_of(graph_of(work.trace));
  try {
    find_or_build(device, work);
    if (look != nullptr || work.plan->to_be_plain || !keeps_alive(*work.plan, work.trace)) {
      look_again(device, work, look);
    }
  } catch (...) {
    poison_all(work.trace, std::current_exception(), undone);
    throw;
  }

  if (reason == FlushReason::kStep || reason == FlushReason::kLoader) device.trains = true;
  if (device.trains) work.plan->repeats = true;
  Submitted made{work.plan, reason, work.first, std::move(work.news)};
  run(recorder, std::move(work), may_begin);
  return made;
}

void Session::run(Recorder& recorder, Work work, const MayBegin& may_begin) {
  Device& device = devices_[static_cast<size_t>(recorder.device())];
  std::vector<exec::Given> given = std::exchange(device.room, {});
  given.reserve(work.trace.entries.size());
  for (record::Entry& entry : work.trace.entries) {
    given.push_back({std::move(entry.memory), entry.byte_offset});
  }
  CapturedResults& results = device.results;
  const auto make_way = [&](uint64_t number, std::vector<exec::Given>& inputs) {
    return results.make_way(number, inputs, recorder.device());
  };
  work.runs = work.plan;
  exec::Outcome outcome;
  try {
    const base::CountedTime time(Counter::RunUs);
    runtime::follow_own_streams(recorder.device());
    if (verifies()) {
      outcome = run_verified(*work.plan, recorder.device(), std::move(given), work.trace.values);
    } else {
      Turn turn(work.plan, recorder.device());
      work.runs = turn.runs();
      if (turn.begins()) count_captures(device);
      outcome = exec::run(*work.runs, recorder.device(), std::move(given), work.trace.values,
                          {std::move(work.trace.places), &record::short_source_text}, make_way,
                          may_begin);
      turn.end(outcome.error == nullptr && outcome.stopped == nullptr);
    }
  } catch (...) {  // not by a step, whose errors are in the outcome
    poison_all(work.trace, std::current_exception(), undone_of(work.runs->program));
    throw;
  }
  finish(recorder, std::move(work), std::move(outcome), may_begin == nullptr);
}

bool Session::submit_watched(Recorder& recorder, const Look& look) {
  Submitted made;
  {
    const auto lock = recorder.lock();
    if (recorder.pending() == 0) return false;
    made = submit(recorder, FlushReason::kStep, 0, look);
  }
  tell(std::move(made));
  return true;
}

Cached Session::renewed(Recorder& recorder, const Cached& plan) {
  const auto lock = recorder.lock();
  if (!plan->to_be_plain) return plan;
  return renew(devices_[static_cast<size_t>(recorder.device())], plan, {});
}

void Session::replay(Recorder& recorder, const Cached& plan, const Replay& replay) {
  std::unique_ptr<runtime::Marker> oldest;
  std::optional<Submitted> made;
  {
    const auto lock = recorder.lock();
    if (recorder.suspended()) resume(recorder);
    if (recorder.pending() > 0) made = submit(recorder, FlushReason::kStep);
    const Running running(recorder);
    Work work;
    work.plan = plan;
    work.trace = recorder.take();  // empty: its room, and a number of its own
    replay.fill(work.trace);
    count(Counter::Replays);
    count(Counter::Flushes);
    count(counter_of(FlushReason::kStep));
    run(recorder, std::move(work));
    replay.done();
    oldest = end_step(recorder);
  }
  if (made.has_value()) tell(std::move(*made));
  if (oldest != nullptr) await(recorder, *oldest);
}

static std::atomic<bool> stopped{false};

bool has_ended() { return stopped.load(std::memory_order_relaxed); }

bool submit_watched(c10::DeviceIndex device, const Look& look) {
  runtime::GilRelease release;
  return Session::get().submit_watched(record::recorder(device), look);
}

std::shared_ptr<plan::Plan> renewed(c10::DeviceIndex device,
                                    const std::shared_ptr<plan::Plan>& plan) {
  runtime::GilRelease release;
  return Session::get().renewed(record::recorder(device), plan);
}

void replay(c10::DeviceIndex device, const std::shared_ptr<plan::Plan>& plan,
            const Replay& replay) {
  ACC_CHECK(!has_ended(), "[torchacc.capture] a step was replayed while the process ends.");
  if (runtime::in_bad_fork()) runtime::note_use();
  runtime::GilRelease release;
  // What another thread records is submitted, too.
  if (record::watching()) note_cuts(device, FlushReason::kStep);
  Session::get().replay(record::recorder(device), plan, replay);
}

size_t others_wait_for(c10::DeviceIndex device) {
  const Recorder& recorder = record::recorder(device);
  return recorder.communicates() ? std::max(recorder.pending(), size_t{1}) : 0;
}

bool is_stopped(c10::DeviceIndex device) { return record::recorder(device).suspended(); }

bool runs(c10::DeviceIndex device) { return record::recorder(device).running(); }

void flush(c10::DeviceIndex device, FlushReason reason, const MayBegin& may_begin) {
  if (has_ended()) return;
  // A program that trains on the CPU ends steps, too, and nothing was recorded yet.
  if (device < 0 && runtime::chosen_backend() == nullptr) return;
  if (runtime::in_bad_fork()) runtime::note_use();
  if (strict().on) {
    for (const c10::DeviceIndex index : with_pending(device)) refuse_cut(index, reason);
  }
  const uint32_t place = count_place(device, reason);
  runtime::GilRelease release;
  if (record::watching()) note_cuts(device, reason);
  std::string complaint;
  const auto flush_one = [&](c10::DeviceIndex index) {
    std::string found = Session::get().flush(record::recorder(index), reason, place, may_begin);
    if (complaint.empty()) complaint = std::move(found);
  };
  if (device >= 0) {
    flush_one(device);
  } else {
    for (int i = 0; i < runtime::backend().device_count(); ++i) {
      flush_one(static_cast<c10::DeviceIndex>(i));
    }
  }
  if (!complaint.empty()) throw base::Error(complaint);
}

void start() {
  runtime::FlushHooks hooks;
  hooks.flush = [](c10::DeviceIndex device, runtime::Cause cause) {
    // Who ran out of memory wants to know who has it, not to hear it again.
    if (cause == runtime::Cause::kRead && device >= 0 && record::recorder(device).suspended()) {
      return;
    }
    if (cause == runtime::Cause::kExplicit && strict().on) {
      for (const c10::DeviceIndex index : with_pending(device)) refuse_wait(index);
    }
    constexpr std::array kReasons{FlushReason::kExplicit, FlushReason::kRead, FlushReason::kEvent};
    flush(device, kReasons[static_cast<size_t>(cause)]);
  };
  hooks.pending = [](c10::DeviceIndex device) noexcept {
    const Recorder& recorder = record::recorder(device);
    // In this order: a trace that is taken is running before it stops being pending.
    return recorder.pending() > 0 || recorder.running() || recorder.suspended();
  };
  hooks.note_wait = [](c10::DeviceIndex device) {
    if (with_pending(device).empty()) count_wait();
  };
  hooks.resize_storage = [](c10::StorageImpl& storage, size_t nbytes) {
    resize_storage(static_cast<LazyStorage&>(storage), nbytes);
  };
  hooks.release_cached = [](c10::DeviceIndex device) {
    const auto lock = record::recorder(device).lock();
    Session::get().release_cached(device);
  };
  hooks.last_work = [](c10::DeviceIndex device) {
    return Session::get().last_work(record::recorder(device));
  };
  runtime::install_flush_hooks(hooks);
}

std::string stop() {
  // A forked child has its parent's pending work and none of its threads.
  if (has_ended() || runtime::in_bad_fork()) return "";
  std::string problem;
  const runtime::Backend* const known = runtime::chosen_backend();
  const int devices = known == nullptr ? 0 : known->device_count();  // else nothing was recorded
  for (int i = 0; i < devices; ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    try {
      try {
        flush(device, FlushReason::kExit);
      } catch (const c10::OutOfMemoryError&) {
        settle(device);  // nothing goes on with it later
      }
    } catch (...) {
      // Whoever still reads what the failed step was to make is told; mostly nobody does.
      problem = runtime::text_of(std::current_exception());
    }
  }
  stopped.store(true);
  return problem;
}

bool settle(c10::DeviceIndex device) {
  if (has_ended()) return false;
  runtime::GilRelease release;
  Session::get().settle(record::recorder(device));
  return true;
}

}  // namespace acc::session
