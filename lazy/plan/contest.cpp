#include "lazy/plan/contest.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "csrc/base/check.h"
#include "lazy/plan/trial.h"

namespace acc::plan {
namespace {

// A plan is slower only if it is so by a twentieth, and by more than the beginning of a run may
// differ. Whole steps differ less from run to run than their parts do.
constexpr double kClearly = 1.05;
constexpr double kClearlySeconds = 5e-6;

}  // namespace

Contest::Contest(std::shared_ptr<Plan> plain)
    : plain_(std::move(plain)),
      best_(std::numeric_limits<double>::infinity()),
      plain_best_(std::numeric_limits<double>::infinity()) {}

bool Contest::decided() const {
  return plain_runs_ >= Trial::kRunsToBeSure || (plain_runs_ >= Trial::kRuns && !plain_is_faster());
}

void Contest::note(double seconds) {
  ACC_CHECK(!decided());
  const bool plain = plain_is_next();
  double& best = plain ? plain_best_ : best_;
  best = std::min(best, seconds);
  ++(plain ? plain_runs_ : runs_);
}

bool Contest::plain_is_faster() const {
  return best_ > plain_best_ * kClearly && best_ > plain_best_ + kClearlySeconds;
}

}  // namespace acc::plan
