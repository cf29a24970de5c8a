#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lazy/exec/runner.h"
#include "lazy/plan/plan.h"

// What torch.profiler (and any other observer of at::RecordFunction, as nvtx) is told of a run.
namespace acc::exec {

// Ranges, each within the one before, all with names that begin with "acc: ":
//   acc: plan 1f0c93d2 (57 steps, 130 operators)    the run
//   acc: at net.py:12 in forward [Net.layers.0]     steps in a row that this place recorded
//   acc: aten::addmm                                a step that is one operator
//   acc: fused: add, mul, relu (7 operators)        a step that is a generated kernel
//   acc: captured work (54 steps)                   a CUDA graph, of which the rest are kernels
//
// Operators have other names here than where the program called them, where the dispatcher told
// observers of `aten::addmm`: sums by name would count each twice. What an operator calls in turn
// shows under its own name.
class Profile {
 public:
  // Asks once whether anybody observes. Where nobody does, nothing else happens.
  Profile(const plan::Plan& plan, const plan::Schedule& schedule, const Places& places);

  bool observed() const { return observed_; }

  // Only while observed. A step begins, and the one before is over. `arguments` of the operator;
  // null for a kernel.
  void begin_step(size_t index, const std::vector<c10::IValue>* arguments);
  // The same, of so many steps that are submitted together. Where they are calls after all (on the
  // host), each begins a step.
  void begin_piece(size_t steps);

 private:
  std::string place_of(const plan::Step& step) const;

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  const Places& places_;
  const bool observed_;
  std::string place_name_;
  // The innermost last: they end in the opposite order.
  std::optional<at::RecordFunction> run_;
  std::optional<at::RecordFunction> place_;
  std::optional<at::RecordFunction> step_;
};

}  // namespace acc::exec
