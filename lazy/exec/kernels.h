#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/library/aten_call.h"
#include "lazy/plan/plan.h"

// Generated kernels of a plan: made while its first run goes on without them, called from the
// second.
namespace acc::exec {

// The schedule that the next run of the plan goes by. As soon as the plan repeats its kernels are
// requested; the run after that waits for them, within limits, and what could be made is fused from
// then on. In the next few runs the kernels are compared with what they replace (see
// lazy/plan/trial.h), and those that are slower are put aside, once, with a warning.
//
// Where bits must not depend on time (ACC_DETERMINISTIC, deterministic algorithms, several
// processes that train together) a plan waits as long as it takes, and all kernels stay.
plan::Schedule& choose_schedule(plan::Plan& plan);

// Several processes train together from now on: they must all make the same choices. Returns false
// where they did so from the start. Plans of before may have chosen by time.
bool choose_alike();

// Whether all runs of the plan from now on go by this schedule, as far as can be told.
bool is_settled(const plan::Plan& plan, const plan::Schedule& schedule);

// One step's launches, ready to be called again and again.
class KernelCall {
 public:
  KernelCall(const plan::Plan& plan, const plan::Step& step,
             const std::vector<library::Slot>& slots);

  // The memory that the slots point at now, and the numbers of this step.
  void set(std::span<const int64_t> values);
  // Runs them with what was set, by as many threads as ATen's kernels do.
  void launch() const;

 private:
  struct Launch {
    const passes::Launch* spec;
    size_t pointers;      // begin of its pointers
    size_t numbers;       // begin of its numbers
    int64_t first_block;  // of all launches' blocks in a row
  };
  void run_blocks(int64_t begin, int64_t end) const;

  codegen::HostFunction function_;
  int64_t block_;  // elements of a block
  std::vector<Launch> launches_;
  std::vector<const c10::StorageImpl*> memory_;  // per operand of all launches
  std::vector<char*> pointers_;
  std::vector<int64_t> numbers_;
  int64_t blocks_ = 0;
  int64_t grain_ = 1;
};

}  // namespace acc::exec
