#include "lazy/session/turn.h"

#include <c10/util/Exception.h>

#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "lazy/exec/kernels.h"
#include "lazy/plan/contest.h"
#include "lazy/plan/describe.h"
#include "lazy/session/replay.h"

namespace acc::session {
namespace {

// The plan as it would be without all that is done for speed; null where memory may not do for it.
std::shared_ptr<plan::Plan> plain_form(const plan::Plan& plan, c10::DeviceIndex device) {
  plan::Options wish = plan.options;
  wish.fuse = false;
  auto plain = make_plan(plan.graph, plan.key, plan.outputs, wish);
  const uint64_t needed = plan::describe(*plain, plain->unfused).peak_bytes;
  return needed < runtime::backend().memory_info(device).first ? plain : nullptr;
}

// Begins the contest of a plan that is due for it.
void begin_contest(plan::Plan& plan, c10::DeviceIndex device) {
  if (!plan.unproven || plan.contest != nullptr || !exec::may_be_compared(plan)) return;
  auto plain = plain_form(plan, device);
  plan.unproven = plain != nullptr;
  if (plain == nullptr) return;
  plan.compared = plain->compared = true;
  plan.contest = std::make_shared<plan::Contest>(std::move(plain));
}

void end_contest(plan::Plan& plan) {
  const auto contest = std::exchange(plan.contest, nullptr);
  plan.unproven = plan.compared = false;
  if (!contest->plain_is_faster()) return;
  plan.to_be_plain = true;
  base::count(base::Counter::PlansPutAside);
  TORCH_WARN("[plan] a step of ", plan.graph.nodes.size(), " operators took ",
             contest->seconds() * 1e3, " ms as optimized and ", contest->plain_seconds() * 1e3,
             " ms with its operators one by one, and runs so from now on.");
}

}  // namespace

Turn::Turn(const std::shared_ptr<plan::Plan>& plan, c10::DeviceIndex device)
    : plan_(plan), runs_(plan), device_(device) {
  begin_contest(*plan_, device_);
  if (plan_->contest == nullptr) return;
  if (plan_->contest->plain_is_next()) runs_ = plan_->contest->plain();
  runtime::backend().synchronize(device_);
  begin_ = Clock::now();
}

void Turn::end() {
  if (plan_->contest == nullptr) return;
  runtime::backend().synchronize(device_);
  plan_->contest->note(std::chrono::duration<double>(Clock::now() - begin_).count());
  if (plan_->contest->decided()) end_contest(*plan_);
}

}  // namespace acc::session
