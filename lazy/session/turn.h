#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>

#include "lazy/plan/plan.h"

namespace acc::session {

// A run of a plan, or of its plain form where that is compared with it (lazy/plan/contest.h): then
// the run is timed, and the plan that lost is not run again.
//
// Not on a GPU: captured work is what would have to be timed there.
class Turn {
 public:
  Turn(const std::shared_ptr<plan::Plan>& plan, c10::DeviceIndex device);

  // What is to run.
  const std::shared_ptr<plan::Plan>& runs() const { return runs_; }
  // Whether a contest begins with it: the plan then takes more memory.
  bool begins() const { return begins_; }

  // It ran: to its end, or it failed or stopped, which no contest is worth.
  void end(bool well);

 private:
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<plan::Plan> plan_;
  std::shared_ptr<plan::Plan> runs_;
  bool begins_ = false;
  Clock::time_point begin_;
};

}  // namespace acc::session
