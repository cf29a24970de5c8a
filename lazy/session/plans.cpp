#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "kernels/codegen/render.h"
#include "lazy/exec/kernels.h"
#include "lazy/exec/refusals.h"
#include "lazy/exec/runner.h"
#include "lazy/passes/switches.h"
#include "lazy/session/planning.h"
#include "lazy/session/reasons.h"
#include "lazy/session/session_impl.h"

// Plans that are kept: what they are for people, and when they go.
namespace acc::session {

using record::FlushReason;
using record::Recorder;

std::optional<LastPlan> Session::describe(c10::DeviceIndex index, bool largest) {
  Recorder& recorder = record::recorder(index);
  const auto lock = recorder.lock();
  const Device& device = devices_[static_cast<size_t>(index)];
  const Ran& ran = largest ? device.largest : device.last;
  if (ran.plan == nullptr) return std::nullopt;
  const plan::Plan& plan = *ran.plan;
  // A plan that has its kernels is about to have no other form any more.
  const bool replaced =
      plan.trial != nullptr || (ran.schedule->steps.empty() && !plan.fused.steps.empty());
  LastPlan made;
  made.description = plan::describe(plan, replaced ? plan.fused : *ran.schedule);
  for (uint32_t i = 0; i < plan.kernels.size(); ++i) {
    const codegen::KernelText gpu = exec::gpu_text(plan, i);
    made.kernels.push_back(
        {exec::for_gpus() ? gpu.name : codegen::render_host(plan.kernels[i]).name, gpu.text});
  }
  made.cuda_preamble = codegen::cuda_preamble();
  made.cuda_options.assign(std::begin(codegen::kCudaOptions), std::end(codegen::kCudaOptions));
  made.ended_by = base::name(counter_of(ran.reason));
  constexpr size_t kLongestLoop = 64;
  std::vector<Cached> turn{ran.plan};
  Cached next = ran.plan->next.lock();
  while (next != nullptr && std::ranges::find(turn, next) == turn.end() &&
         turn.size() < kLongestLoop) {
    turn.push_back(next);
    next = next->next.lock();
  }
  // What runs in turn now may not come back to it.
  if (next != turn.front() && turn.size() < kLongestLoop) turn.resize(1);
  for (const Cached& each : turn) made.loop.push_back(each->graph.nodes.size());
  return made;
}

void Session::time_plans(bool on) {
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    const auto lock = record::recorder(static_cast<c10::DeviceIndex>(i)).lock();
    if (on) devices_[static_cast<size_t>(i)].largest = {};
  }
  exec::time_steps(on);
}

void Session::forget_plans(c10::DeviceIndex index) {
  Recorder& recorder = record::recorder(index);
  const auto lock = recorder.lock();
  recorder.stop_expecting();
  Device& device = devices_[static_cast<size_t>(index)];
  device.expected.reset();
  device.last = {};
  device.largest = {};
  device.cut = false;
  device.plans.clear();
}

void Session::drop_plans(c10::DeviceIndex index) {
  forget_plans(index);
  Recorder& recorder = record::recorder(index);
  const auto lock = recorder.lock();
  // Work that waits has its intermediates there.
  if (!recorder.suspended()) exec::release_arena(index);
}

std::optional<LastPlan> describe_plan(c10::DeviceIndex device, bool largest) {
  return Session::get().describe(device, largest);
}

void time_plans(bool on) { Session::get().time_plans(on); }

namespace {

void release_all() {
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    release_memory(static_cast<c10::DeviceIndex>(i));
  }
}

}  // namespace

void capture_plans(std::optional<bool> on) {
  exec::capture_plans(on);
  release_all();
}

uint64_t captures_bytes(c10::DeviceIndex device) {
  const auto lock = record::recorder(device).lock();
  return exec::captures_bytes(device);
}

bool for_gpus() { return exec::for_gpus(); }

void refuse_captures(const std::string& names) {
  release_all();
  exec::refuse_captures(names);
}

void skip_passes(const std::string& names) {
  passes::skip(names);
  release_all();
}

static void forget_all_plans() {
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    Session::get().forget_plans(static_cast<c10::DeviceIndex>(i));
  }
}

void run_alike() {
  if (!runtime::choose_alike()) return;
  forget_all_plans();  // of before, which may have chosen by time
  exec::forget_needed_kernels();
}

void run_unfused() {
  if (stop_fusing()) forget_all_plans();
}

void release_memory(c10::DeviceIndex device) {
  flush(device, FlushReason::kExplicit);
  Session::get().drop_plans(device);
}

}  // namespace acc::session
