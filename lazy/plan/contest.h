#pragma once

#include <cstdint>
#include <memory>

#include "lazy/plan/plan.h"

namespace acc::plan {

// Finds, in a few runs of both, whether a plan is slower than one of the same graph that has its
// operators as they were recorded, one by one.
//
// The trial of kernels (lazy/plan/trial.h) compares two schedules of one program. What passes made
// of the recording before is in both: layouts, joined products, backwards in parts. They go by
// models of what that gains, and a machine may be another one than the models are of.
class Contest {
 public:
  explicit Contest(std::shared_ptr<Plan> plain);

  const std::shared_ptr<Plan>& plain() const { return plain_; }

  // The two run in turn, so that what else the machine does falls on both.
  bool plain_is_next() const { return plain_runs_ < runs_; }
  bool decided() const;

  // A complete run of the one that was next. Not once decided.
  void note(double seconds);

  // Whether the plan is slower, so far; and the fastest run of each.
  bool plain_is_faster() const;
  double seconds() const { return best_; }
  double plain_seconds() const { return plain_best_; }

 private:
  std::shared_ptr<Plan> plain_;
  uint32_t runs_ = 0;
  uint32_t plain_runs_ = 0;
  double best_;
  double plain_best_;
};

}  // namespace acc::plan
