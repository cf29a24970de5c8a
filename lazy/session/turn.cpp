#include "lazy/session/turn.h"

#include <c10/util/Exception.h>

#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "lazy/exec/kernels.h"
#include "lazy/plan/contest.h"
#include "lazy/plan/describe.h"
#include "lazy/record/source.h"
#include "lazy/session/replay.h"

namespace acc::session {
namespace {

// Whether a plan may take part in a contest now.
bool may_begin(plan::Plan& plan) {
  return plan.unproven && plan.contest == nullptr && runtime::on_host() &&
         exec::may_be_compared(plan);
}

// The plan as it would be without all that is done for speed.
std::shared_ptr<plan::Plan> plain_form(const plan::Plan& plan) {
  plan::Options wish = plan.options;
  wish.fuse = false;
  return make_plan(plan.graph, plan.key, plan.outputs, wish);
}

// Whether there is memory for it, and as much again for what its operators need meanwhile.
bool has_room(const plan::Plan& plain, c10::DeviceIndex device) {
  const uint64_t needed = plan::describe(plain, plain.unfused).peak_bytes;
  return needed < runtime::backend().memory_info(device).first / 2;
}

void end_contest(plan::Plan& plan) {
  plan.contest = nullptr;
  plan.unproven = plan.compared = false;
}

// The plan is slower: it is not run again.
void put_aside(plan::Plan& plan, const plan::Contest& contest) {
  plan.to_be_plain = true;
  base::count(base::Counter::PlansPutAside);
  const uint32_t source = plan.graph.nodes.front().source;
  TORCH_WARN("[plan] a step of ", plan.graph.nodes.size(), " operators",
             source == 0 ? "" : ", first recorded", record::source_text(source), ", took ",
             contest.seconds() * 1e3, " ms as optimized and ", contest.plain_seconds() * 1e3,
             " ms operator by operator, which is how it runs from now on. Report this; "
             "ACC_SKIP_PASSES=layout (or split, rows, products, accumulate, recompute) tells which "
             "pass it was.");
}

}  // namespace

Turn::Turn(const std::shared_ptr<plan::Plan>& plan, c10::DeviceIndex device)
    : plan_(plan), runs_(plan) {
  if (may_begin(*plan_)) {
    auto plain = plain_form(*plan_);
    begins_ = has_room(*plain, device);
    plan_->unproven = begins_;
    if (!begins_) return;
    plan_->compared = plain->compared = true;
    plan_->contest = std::make_shared<plan::Contest>(std::move(plain));
  }
  if (plan_->contest == nullptr) return;
  if (plan_->contest->plain_is_next()) runs_ = plan_->contest->plain();
  begin_ = Clock::now();
}

void Turn::end(bool well) {
  const auto contest = plan_->contest;
  if (contest == nullptr) return;
  if (!well) return end_contest(*plan_);
  contest->note(std::chrono::duration<double>(Clock::now() - begin_).count());
  if (!contest->decided()) return;
  end_contest(*plan_);
  if (contest->plain_is_faster()) put_aside(*plan_, *contest);
}

}  // namespace acc::session
