#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lazy/plan/plan.h"

namespace acc::plan {

// Finds, in a few runs of both schedules of a plan, the kernels that are slower than the nodes that
// they replace.
//
// The two run in turn, so that what else the machine does falls on both. A kernel's step is
// compared with the sum of its nodes' times in a run, and of several runs the fastest counts:
// others took longer because of something else. The nodes are not compared one by one, since the
// fastest of many short times would be less disturbed than that of one long time. What looks slower
// after a few runs is given as many again and more before anything is decided.
//
// Step by step rather than the plan as a whole: what is alike in both costs the same, so the fused
// schedule is slower only where one of its kernels is, and the others keep what they win. What is
// alike in both is compared afterwards (lazy/plan/contest.h).
class Trial {
 public:
  struct Slower {
    uint32_t step;  // of the fused schedule
    double seconds;
    double unfused_seconds;  // of its nodes
  };

  // Runs of each schedule after which kernels that are not slower are settled, and after which all
  // are. The first of each also meets cold caches and memory that it is the first to touch.
  static constexpr uint32_t kRuns = 3;
  static constexpr uint32_t kRunsToBeSure = 10;

  // `unfused` has one step per node, but for kernels that are in both and not compared; `fused` has
  // the same nodes. Nodes that compute values again (lazy/passes/recompute.h) count, too: without
  // the kernel they would run.
  Trial(const std::vector<Step>& unfused, const std::vector<Step>& fused);

  bool next_is_fused() const { return fused_runs_ == unfused_runs_; }
  bool decided() const { return decided_; }

  // A complete run of the schedule that was next: the time of each of its steps. Not once decided.
  void note(std::span<const double> seconds);

  // The kernels that are slower, so far.
  std::vector<Slower> slower() const;

 private:
  // A kernel's step.
  struct Pair {
    uint32_t step;
    double fused;
    double unfused;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  std::vector<Pair> pairs_;
  std::vector<uint32_t> pair_of_fused_;    // per step
  std::vector<uint32_t> pair_of_unfused_;  // per step
  uint32_t fused_runs_ = 0;
  uint32_t unfused_runs_ = 0;
  bool decided_ = false;
};

}  // namespace acc::plan
