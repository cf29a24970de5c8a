#include "lazy/exec/runner.h"

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
#include "csrc/runtime/transfers.h"
#include "lazy/exec/captured.h"
#include "lazy/exec/kernels.h"
#include "lazy/exec/profile.h"
#include "lazy/exec/refusals.h"
#include "lazy/exec/run.h"
#include "lazy/exec/surroundings.h"
#include "lazy/plan/trial.h"

namespace acc::exec {
namespace {

using base::count;
using base::count_keyed;
using base::Counter;

std::atomic<bool> timing{false};

bool captures_at_first() { return !runtime::on_host() || base::env::host_graphs(); }

std::atomic<bool>& capturing() {
  static std::atomic<bool> value = captures_at_first();
  return value;
}

// Whether runs that repeat become captured work.
bool captures_runs(c10::DeviceIndex device) {
  using base::env::Mode;
  const Mode mode = base::env::mode();
  return capturing().load(std::memory_order_relaxed) &&
         (mode == Mode::Full || mode == Mode::NoFuse) && runtime::backend().can_capture(device);
}

// Takes the time of a run's steps when the user wants to know, and for the trial of the plan's
// kernels while there is one. The schedule keeps it either way, for torchacc.graph.
class StepClock {
 public:
  StepClock(plan::Plan& plan, plan::Schedule& schedule, c10::DeviceIndex device)
      : plan_(plan), schedule_(schedule), device_(device) {
    if (!times_steps() && plan.trial == nullptr) return;
    seconds_.resize(schedule_.steps.size());
    start();
  }

  // Arguments of a kernel are part of the step's time only where each run uploads them for each
  // kernel: captured work uploads all of them at once.
  template <class Upload>
  void upload(const Upload& upload) {
    if (seconds_.empty() || !captures_runs(device_)) return upload();
    const Clock::time_point begin = Clock::now();
    upload();
    runtime::backend().synchronize(device_);
    last_ += Clock::now() - begin;
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
    schedule_.seconds.resize(seconds_.size(), std::numeric_limits<double>::infinity());
    for (size_t i = 0; i < seconds_.size(); ++i) {
      schedule_.seconds[i] = std::min(schedule_.seconds[i], seconds_[i]);
    }
    ++schedule_.timed_runs;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void start() {
    // The clock's own wait, at no line of the program: `note_wait` is not told.
    runtime::backend().synchronize(device_);
    last_ = Clock::now();
  }

  plan::Plan& plan_;
  plan::Schedule& schedule_;
  const c10::DeviceIndex device_;
  std::vector<double> seconds_;
  Clock::time_point last_;
};

// All captures of a device, guarded by its mutex.
std::vector<std::weak_ptr<Captures>>& all_captures(c10::DeviceIndex device) {
  static auto& all =
      *new std::array<std::vector<std::weak_ptr<Captures>>, base::env::kMaxHostDevices>;
  return all.at(static_cast<size_t>(device));
}

// The captures of a schedule, where its runs are to be captured; else null.
std::shared_ptr<Captures> captures_of(const plan::Plan& plan, plan::Schedule& schedule,
                                      c10::DeviceIndex device, const Places& places) {
  if (!captures_runs(device) || !plan.has_run || times_steps() || !is_settled(plan, schedule)) {
    return nullptr;
  }
  if (schedule.captures == nullptr) {
    auto made = std::make_shared<Captures>(plan, schedule, places.text);
    std::erase_if(all_captures(device), [](const auto& each) { return each.expired(); });
    all_captures(device).push_back(made);
    schedule.captures = std::move(made);
  }
  return std::static_pointer_cast<Captures>(schedule.captures);
}

// PyTorch keeps handles of libraries by thread, and cuDNN's choices of algorithms. Neither can be
// made in a capture, so a thread captures what it has run itself. Where each run has a thread of
// its own none would come again: from some on, any may.
constexpr size_t kFewThreads = 16;

// Not those of the system, which gives them to later threads.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

bool may_capture_here(const plan::Plan& plan) {
  return plan.run_by.size() >= kFewThreads ||
         std::ranges::find(plan.run_by, this_thread()) != plan.run_by.end();
}

void note_run(plan::Plan& plan) {
  plan.has_run = true;
  if (!may_capture_here(plan)) plan.run_by.push_back(this_thread());
}

void drop_captures(c10::DeviceIndex device) {
  for (const std::weak_ptr<Captures>& each : all_captures(device)) {
    if (const auto captures = each.lock()) captures->drop_all();
  }
}

}  // namespace

// A run from its first step to its last, in as many goes as it takes.
class Stopped {
 public:
  Stopped(plan::Plan& plan, plan::Schedule& schedule, c10::DeviceIndex device,
          std::vector<Given> given, Places places)
      : plan_(plan),
        schedule_(schedule),
        device_(device),
        given_(std::move(given)),
        places_(std::move(places)) {}

  // The run submits what one of `captures` has captured, from its first step to its last.
  Outcome submit(std::shared_ptr<Captures> captures, Captured& captured,
                 std::span<const int64_t> values) {
    captures_ = std::move(captures);
    submitted_ = &captured;
    return submit(values, /*begins=*/true);
  }

  Outcome go_on(std::span<const int64_t> values, const MayBegin& may_begin) {
    if (submitted_ != nullptr) return submit(values, /*begins=*/false);
    Surroundings surroundings(device_);
    const size_t begin = step_;
    size_t tried_again = kNever;  // the step that found no memory the last time
    Outcome outcome;
    for (bool once_more = true; once_more;) {
      once_more = false;
      try {
        const bool ended = advance(values, surroundings.ambient, may_begin);
        outcome.error = nullptr;
        if (!ended) outcome.stopped = std::make_shared<Stopped>(std::move(*this));
      } catch (...) {
        outcome.error = std::current_exception();
        const bool was_captured = std::exchange(is_captured_, false);
        if (capture_ != nullptr) capture_->give_up();
        if (may_repeat() && runtime::is_out_of_memory(outcome.error) && joined(&outcome.error)) {
          once_more = tried_again != step_;
          tried_again = step_;
          if (once_more) {
            found_no_memory_ = true;
            if (was_captured) captures_->found_no_memory();
            outcome.given_back += give_back(device_);
            outcome.recaptured = true;
          }
          if (!once_more) {
            if (capture_ != nullptr) outcome.capture = *capture_->number();
            outcome.stopped = std::make_shared<Stopped>(std::move(*this));
          }
        }
      }
    }
    outcome.schedule = &schedule_;
    if (outcome.error != nullptr && outcome.stopped == nullptr) end_transfers();
    outcome.failed_before = outcome.stopped == nullptr && stops_;
    outcome.failed_step = outcome.stopped == nullptr ? step_ : outcome.stopped->step_;
    count(Counter::Steps, outcome.failed_step - begin);
    if (outcome.stopped == nullptr) outcome.outputs = take_outputs();
    if (capture_ == nullptr) return outcome;
    outcome.capture = *capture_->number();
    if (outcome.error == nullptr && capture_->captured()) {
      outcome.keeper = capture_->number();
      captures_->keep(std::move(capture_));
      outcome.recaptured = true;
    }
    return outcome;
  }

  Outcome give_up(std::exception_ptr error) {
    const runtime::TransfersOf transfers(device_);
    end_transfers();
    Outcome outcome;
    outcome.schedule = &schedule_;
    outcome.outputs = take_outputs();
    outcome.failed_step = step_;
    outcome.error = std::move(error);
    // What has no contents lies where captured work writes, too, and may get some.
    if (capture_ != nullptr) outcome.capture = *capture_->number();
    if (submitted_ != nullptr) {
      outcome.capture = *submitted_->number();
      outcome.keeper = submitted_->number();
    }
    return outcome;
  }

  void leave_out_unneeded(std::vector<bool> needed) {
    needed_ = std::move(needed);
    release_untouched();
  }

  std::vector<Output> hand_over_complete(const std::vector<bool>& alive) {
    std::vector<Output> outputs;
    if (submitted_ != nullptr) outputs = submitted_->outputs();
    if (run_.has_value()) outputs = run_->outputs();
    std::vector<bool> awaited(plan_.program.buffers.size());
    for (size_t step = step_; step < schedule_.steps.size(); ++step) {
      for (const graph::Use& use : uses_of(step)) {
        if (use.writes) awaited[use.buffer] = true;
      }
    }
    std::erase_if(outputs, [&](const Output& output) { return awaited[output.buffer]; });
    for (const auto& [buffer, memory] : outputs) {
      if (run_.has_value() && buffer < alive.size() && alive[buffer]) run_->share(buffer);
    }
    release_untouched();
    return outputs;
  }

  size_t next_step() const { return step_; }
  const plan::Schedule& schedule() const { return schedule_; }

 private:
  // What no needed step that did not run touches is kept by who wants it.
  void release_untouched() {
    touched_.assign(plan_.program.buffers.size(), false);
    for (size_t step = step_; step < schedule_.steps.size(); ++step) {
      if (!is_needed(step)) continue;
      for (const graph::Use& use : uses_of(step)) touched_[use.buffer] = true;
    }
    // What was made while work was captured is asked for again at the end (CapturedResults).
    if (!run_.has_value() || capture_ != nullptr) return;
    for (uint32_t i = 0; i < touched_.size(); ++i) {
      if (!touched_[i]) run_->release(i);
    }
  }

  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  // What is captured is submitted. A step of it that finds no memory waits: to drop what others
  // have captured would free nothing, since what is submitted keeps the pool.
  Outcome submit(std::span<const int64_t> values, bool begins) {
    Outcome outcome;
    outcome.schedule = &schedule_;
    outcome.outputs = submitted_->outputs();
    outcome.capture = *submitted_->number();
    outcome.keeper = submitted_->number();
    Profile profile(plan_, schedule_, places_);
    Surroundings surroundings(device_);
    const Captured::Submission submission{surroundings.ambient, profile, needed_, &step_};
    try {
      if (begins) submitted_->begin(given_, values);
      submitted_->go_on(values, submission);
    } catch (...) {
      outcome.error = std::current_exception();
    }
    outcome.failed_step = step_;
    if (outcome.error == nullptr) {
      given_.clear();
      outcome.room = std::move(given_);
    } else if (runtime::is_out_of_memory(outcome.error) && submitted_->may_go_on() &&
               joined(&outcome.error)) {
      outcome.stopped = std::make_shared<Stopped>(std::move(*this));
      outcome.outputs.clear();
    } else {
      end_transfers();
    }
    return outcome;
  }

  // False: the next step is an exchange that may not begin yet.
  bool advance(std::span<const int64_t> values, runtime::AmbientScope& ambient,
               const MayBegin& may_begin) {
    Profile profile(plan_, schedule_, places_);
    if (!run_.has_value()) begin(values);
    StepClock clock(plan_, schedule_, device_);
    const bool whole = step_ == 0 && needed_.empty();
    while (step_ < schedule_.steps.size()) {
      if (capture_ != nullptr && capture_->takes(step_)) {
        capture(values, ambient);
        continue;
      }
      called_ = false;
      stops_ = false;
      if (may_begin && capture_ == nullptr && first_node(step_).op->communicates &&
          !may_begin(graph::exchange_group(plan_.program, first_node(step_)))) {
        stops_ = true;
        runtime::join_transfers();  // others may run now, which number theirs alike
        return false;
      }
      if (!is_needed(step_)) {
        run_->leave_out(step_, touched_);
      } else {
        ambient.set(ambient_of(step_));
        if (profile.observed()) profile.begin_step(step_, run_->arguments(step_));
        run_->prepare(step_, values);
        clock.upload([this] { run_->upload(step_); });
        run_->call(step_, values, &called_);
        clock.step(step_);
        if (capture_ != nullptr) capture_->add_outside(step_);
      }
      ++step_;
    }
    ACC_CHECK(!runtime::transfers_under_way());  // none outlives its plan
    clock.end(whole);
    if (whole) note_run(plan_);
    if (capture_ != nullptr) capture_->finish(*run_);
    return true;
  }

  void begin(std::span<const int64_t> values) {
    captures_ = captures_of(plan_, schedule_, device_, places_);
    if (captures_ != nullptr && needed_.empty() && !found_no_memory_ && may_capture_here(plan_) &&
        captures_->wants_more()) {
      is_captured_ = true;
      // The pool gets nothing that is cached elsewhere, where earlier runs have left as much as
      // this one needs.
      runtime::backend().synchronize(device_);
      runtime::backend().empty_cache();
      capture_ = captures_->begin(plan_, schedule_, device_, values);
      run_.emplace(capture_->begin(given_));
      return;
    }
    if (schedule_.prepared == nullptr) {
      schedule_.prepared = prepare(plan_, schedule_, device_, {});
    }
    run_.emplace(plan_, schedule_, *static_cast<Prepared*>(schedule_.prepared.get()), device_,
                 given_);
  }

  // Captures the steps from here on, up to the first that is none for it. Where one fails to be
  // captured nothing has happened, and it is none from the next capture on; this run goes on
  // without.
  void capture(std::span<const int64_t> values, runtime::AmbientScope& ambient) {
    runtime::Backend& backend = runtime::backend();
    const size_t begin = step_;
    called_ = false;
    std::vector<c10::Storage> memory = run_->memory();
    std::optional<Contents> before;
    if (like_a_gpu()) {
      runtime::join_transfers();  // what they bring is not to be taken back
      before.emplace(run_->blocks());
    }
    runtime::fork_transfers();
    try {
      refuse_begin(begin);
      backend.begin_capture(device_);
      for (; step_ < schedule_.steps.size() && capture_->takes(step_); ++step_) {
        called_ = false;
        ambient.set(ambient_of(step_));
        run_->step(step_, values, &called_);
        if (before) {
          refuse(first_node(step_).op->name);
          check_refused();
        }
        backend.check_capture(device_);
        capture_->note(step_);
      }
      refuse("end");
      capture_->join_transfers();
      capture_->add_piece(begin, step_, backend.end_capture(device_));
    } catch (...) {
      if (backend.abandon_capture(device_)) {
        if (!before) throw;
        std::exception_ptr failed;  // says so again when the steps are run
        (void)joined(&failed);
        before->restore();
      } else {
        runtime::forget_forked_transfers();
      }
      const bool step_failed = called_ && step_ < schedule_.steps.size() && capture_->takes(step_);
      if (runtime::is_out_of_memory(std::current_exception())) {
        count_keyed("not_captured/failed", "no memory");
        captures_->found_no_memory();
      } else if (step_failed) {
        captures_->leave_outside(step_, std::current_exception());
      } else {
        captures_->leave_all_outside(std::current_exception());
      }
      is_captured_ = false;
      capture_->give_up();
      run_->go_back(std::move(memory));
      step_ = begin;
    }
  }

  const graph::Node& first_node(size_t step) const {
    return plan_.program.nodes[schedule_.steps[step].nodes[0]];
  }
  uint64_t ambient_of(size_t step) const { return first_node(step).ambient; }

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
    if (step_ == schedule_.steps.size()) return false;  // what came behind the last has failed
    return exec::may_repeat(plan_, schedule_.steps[step_]);
  }

  // A run that waits for memory lets others run, which number their transfers alike. Where one of
  // its own has failed, it has failed with that.
  static bool joined(std::exception_ptr* error) {
    try {
      runtime::join_transfers();
      return true;
    } catch (...) {
      *error = std::current_exception();
      return false;
    }
  }

  // Of a run that goes no further.
  void end_transfers() {
    if (runtime::end_all_transfers()) return;
    // Other processes may write to its memory at any time: nothing else gets it.
    if (run_.has_value()) keep_for_ever(*run_, device_);
    if (captures_ == nullptr) return;
    schedule_.captures = nullptr;
    std::erase_if(all_captures(device_),
                  [&](const auto& each) { return each.lock() == captures_; });
    static auto& kept = *new std::vector<std::pair<std::shared_ptr<Captures>, std::vector<Given>>>;
    kept.emplace_back(captures_, given_);
  }

  std::vector<Output> take_outputs() {
    if (submitted_ != nullptr) return submitted_->outputs();
    return run_.has_value() ? run_->take_outputs() : std::vector<Output>();
  }

  plan::Plan& plan_;
  plan::Schedule& schedule_;
  c10::DeviceIndex device_;
  std::vector<Given> given_;
  Places places_;
  std::shared_ptr<Captures> captures_;  // of the schedule; null: nothing is captured
  std::unique_ptr<Captured> capture_;   // of this run, while it is captured
  Captured* submitted_ = nullptr;       // what this run submits: one of `captures_`
  std::optional<Run> run_;
  size_t step_ = 0;
  std::vector<bool> needed_;   // per node; empty: all are
  std::vector<bool> touched_;  // per buffer, by a needed step that did not run
  bool called_ = false;        // the operator of the step was called
  bool stops_ = false;         // before the step
  bool is_captured_ = false;   // so far, and goes on to be
  bool found_no_memory_ = false;
};

Outcome run(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
            std::span<const int64_t> values, Places places, const MakeWay& make_way,
            const MayBegin& may_begin) {
  plan::Schedule& schedule = choose_schedule(plan, device);
  if (&schedule == &plan.unfused && !plan.kernels.empty() && plan.trial == nullptr)
    count(Counter::RunsUnfused);
  if (const auto captures = captures_of(plan, schedule, device, places)) {
    if (Captured* captured = captures->find(given, values)) {
      switch (make_way(*captured->number(), given)) {
        case Way::kFree:
          if (!captured->fits(given, values)) break;  // inputs have been moved
          return Stopped(plan, schedule, device, std::move(given), std::move(places))
              .submit(captures, *captured, values);
        case Way::kTaken:
          count_keyed("captured_again", "result");
          captures->drop(captured);
          break;
        case Way::kNoMemory:
          break;  // only a run from its first step on can wait for memory
      }
    }
  }
  return Stopped(plan, schedule, device, std::move(given), std::move(places))
      .go_on(values, may_begin);
}

Outcome resume(Stopped& stopped, std::span<const int64_t> values, std::vector<bool> needed,
               const MayBegin& may_begin) {
  stopped.leave_out_unneeded(std::move(needed));
  return stopped.go_on(values, may_begin);
}

std::vector<Output> hand_over_complete(Stopped& stopped, const std::vector<bool>& alive) {
  return stopped.hand_over_complete(alive);
}

size_t next_step(const Stopped& stopped) { return stopped.next_step(); }

const plan::Schedule& schedule(const Stopped& stopped) { return stopped.schedule(); }

Outcome give_up(Stopped& stopped, std::exception_ptr error) {
  return stopped.give_up(std::move(error));
}

void time_steps(bool on) { timing.store(on, std::memory_order_relaxed); }

uint64_t captures_bytes(const plan::Plan& plan) {
  uint64_t bytes = 0;
  for (const plan::Schedule* schedule : {&plan.unfused, &plan.fused}) {
    if (schedule->captures == nullptr) continue;
    bytes += static_cast<const Captures*>(schedule->captures.get())->host_bytes();
  }
  return bytes;
}

uint64_t captures_bytes(c10::DeviceIndex device) {
  uint64_t bytes = 0;
  for (const std::weak_ptr<Captures>& each : all_captures(device)) {
    if (const auto captures = each.lock()) bytes += captures->host_bytes();
  }
  return bytes;
}

void release_captures(c10::DeviceIndex device) { drop_captures(device); }

uint64_t give_back(c10::DeviceIndex device) {
  const uint64_t before = runtime::backend().captured_bytes(device);
  drop_captures(device);
  runtime::backend().empty_cache();
  const uint64_t after = runtime::backend().captured_bytes(device);
  return before - std::min(before, after);  // other threads use it too
}

void capture_plans(std::optional<bool> on) {
  capturing().store(on.value_or(captures_at_first()), std::memory_order_relaxed);
}

bool times_steps() { return timing.load(std::memory_order_relaxed); }

}  // namespace acc::exec
