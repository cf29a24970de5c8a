#include "lazy/session/strict.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/ambient.h"
#include "lazy/record/recorder.h"
#include "lazy/record/source.h"
#include "lazy/record/watch.h"
#include "lazy/session/reasons.h"

namespace acc::session {
namespace {

using base::concat;
using record::FlushReason;

constexpr int64_t kWarmUp = 3;  // torchacc.strict's too
constexpr const char* kAllow = " Where it is meant, put it into `with torchacc.strict(False):`.";

Strict& state() {
  static thread_local Strict own{base::env::strict(), kWarmUp};
  return own;
}

// The first `n` operators of the graph.
bool trains(const graph::Graph& graph, size_t n) {
  bool multiplies = false;
  for (size_t i = 0; i < n; ++i) {
    const auto gradients = runtime::gradients_of(graph.nodes[i].ambient);
    if (gradients.value_or(false)) return true;
    multiplies |= gradients.has_value();
  }
  return !multiplies && c10::GradMode::is_enabled();
}

const char* advice_for(FlushReason reason) {
  switch (reason) {
    case FlushReason::kRead:
      return "Read it after the step has ended: with optimizer.step(), or scaler.update() in a "
             "loop with a loader, where nothing follows before the next batch; else with "
             "torchacc.mark_step(). Or read it every some steps.";
    case FlushReason::kFallback:
    case FlushReason::kDataDependent:
      return "Use operators that can be recorded (torch.where for a mask), or do this outside of "
             "the step.";
    case FlushReason::kCap:
      return "Raise ACC_MAX_PENDING or ACC_MAX_PENDING_MB, or end the step earlier "
             "(torchacc.mark_step()).";
    default:
      return "Do it after the step has ended (optimizer.step(), torchacc.mark_step()).";
  }
}

// A step of the calling thread ends. `made`: its plan is new, or null.
std::string end_of_step(const graph::Graph& step, const NewPlan* made) {
  Strict& own = state();
  const bool excused = std::exchange(own.excused, false);
  const bool trained = std::exchange(own.trains, false);
  if (!own.on || (own.warm_up == 0 && made == nullptr)) return "";
  if (!trained && !trains(step, step.nodes.size())) return "";
  if (excused) return "";
  if (own.warm_up > 0) {
    --own.warm_up;
    return "";
  }
  return concat("[strict] a step has another plan than those before",
                record::source_text(place_of(*made)), ": ", text_of(*made),
                ". The step was done all the same. Keep it alike (the last, smaller batch of a "
                "loader: drop_last=True, or padding), or have it in the warm-up.",
                kAllow);
}

// Throws where a step that may not be cut is pending on `device`. `what` would cut it.
void refuse(c10::DeviceIndex device, std::string_view what, const char* advice) {
  Strict& own = state();
  record::Recorder& recorder = record::recorder(device);
  size_t pending = 0;
  {
    const auto lock = recorder.lock();
    pending = recorder.suspended() ? 0 : recorder.pending();
    if (pending == 0 || !trains(recorder.recorded(), pending)) return;
  }
  if (own.warm_up > 0 || own.excused) {
    own.trains = true;
    return;
  }
  const std::string place = record::source_text(record::source_here());
  ACC_FAIL("[strict] ", what, " in the middle of a step", place,
           ", which would be submitted in parts: ", pending, " operators are pending. ", advice,
           kAllow);
}

}  // namespace

Strict strict() { return state(); }

void set_strict(const Strict& strict) { state() = strict; }

void excuse_step(bool on) { state().excused = on; }

void refuse_cut(c10::DeviceIndex device, FlushReason reason, std::string_view op) {
  if (!state().on || !is_cut(reason)) return;
  refuse(device,
         op.empty() ? cut_text(reason) : concat(op, " cannot be recorded and runs at once,"),
         advice_for(reason));
}

void refuse_wait(c10::DeviceIndex device) {
  if (!state().on) return;
  refuse(device, "the device is waited for (synchronize())", advice_for(FlushReason::kEvent));
}

std::string tell(Submitted made) {
  // Whoever submits what is idle is no part of the program.
  if (made.news.has_value() && made.news->submitted_at == 0 && made.reason != FlushReason::kIdle) {
    made.news->submitted_at = record::source_here();
  }
  std::string complaint;
  if (made.reason == FlushReason::kStep || made.reason == FlushReason::kLoader) {
    complaint = end_of_step(made.plan->graph, made.first ? &*made.news : nullptr);
  }
  if (made.news.has_value()) note(std::move(*made.news));
  return complaint;
}

}  // namespace acc::session
