#include "lazy/plan/order.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "lazy/graph/edges.h"

namespace acc::plan {
namespace {

// How far a step may move up: data stays in the cache, and a program's phases where they are.
constexpr size_t kWindow = 16;

class Ordering {
 public:
  Ordering(const Plan& plan, const std::vector<Step>& steps)
      : plan_(plan), left_of_step_(steps.size()), after_(steps.size()), touched_(steps.size()) {
    const size_t buffers = plan.program.buffers.size();
    uses_.assign(buffers, 0);
    std::vector<uint32_t> step_of(plan.program.nodes.size());
    for (uint32_t i = 0; i < steps.size(); ++i) {
      for (const uint32_t node : steps[i].nodes) step_of[node] = i;
      for (const graph::Use& use : uses(plan, steps[i])) {
        if (plan.program.buffers[use.buffer].kind != graph::BufferKind::kFresh) continue;
        if (std::ranges::find(touched_[i], use.buffer) != touched_[i].end()) continue;
        touched_[i].push_back(use.buffer);
        ++uses_[use.buffer];
      }
      movable_.push_back(std::ranges::all_of(
          steps[i].nodes, [&](uint32_t node) { return plan.program.nodes[node].op->removable; }));
    }
    const std::vector<std::vector<uint32_t>> before = graph::predecessors(plan.program);
    for (uint32_t i = 0; i < steps.size(); ++i) {
      for (const uint32_t node : steps[i].nodes) {
        for (const uint32_t on : before[node]) {
          if (step_of[on] == i) continue;
          ++left_of_step_[i];
          after_[step_of[on]].push_back(i);
        }
      }
    }
  }

  std::vector<uint32_t> find() {
    const auto steps = static_cast<uint32_t>(touched_.size());
    start();
    std::vector<uint32_t> order;
    std::vector<uint32_t> left = left_of_step_;
    std::vector<bool> done(steps, false);
    for (uint32_t first = 0; first < steps;) {
      uint32_t next = first;
      if (change(first) > 0) next = find_relief(first, left, done);
      take(next);
      order.push_back(next);
      done[next] = true;
      for (const uint32_t step : after_[next]) --left[step];
      while (first < steps && done[first]) ++first;
    }
    return order;
  }

  int64_t peak(const std::vector<uint32_t>& order) {
    start();
    int64_t held = 0;
    int64_t peak = 0;
    for (const uint32_t step : order) {
      for (const uint32_t buffer : touched_[step]) held += begins(buffer) ? bytes(buffer) : 0;
      peak = std::max(peak, held);
      for (const uint32_t buffer : touched_[step]) held -= ends(buffer) ? bytes(buffer) : 0;
      take(step);
    }
    return peak;
  }

 private:
  void start() { left_ = uses_; }
  void take(uint32_t step) {
    for (const uint32_t buffer : touched_[step]) --left_[buffer];
  }
  bool begins(uint32_t buffer) const { return left_[buffer] == uses_[buffer]; }
  bool ends(uint32_t buffer) const { return left_[buffer] == 1 && !plan_.outputs[buffer]; }
  int64_t bytes(uint32_t buffer) const {
    return static_cast<int64_t>(plan_.program.buffers[buffer].nbytes);
  }

  // How much more is held after the step than before it.
  int64_t change(uint32_t step) const {
    int64_t sum = 0;
    for (const uint32_t buffer : touched_[step]) {
      if (begins(buffer)) sum += bytes(buffer);
      if (ends(buffer)) sum -= bytes(buffer);
    }
    return sum;
  }

  // A step that can run now instead of `first` and leaves less behind than it finds.
  uint32_t find_relief(uint32_t first, const std::vector<uint32_t>& left,
                       const std::vector<bool>& done) const {
    const size_t end = std::min(touched_.size(), first + kWindow);
    for (uint32_t step = first + 1; step < end; ++step) {
      if (!done[step] && left[step] == 0 && movable_[step] && change(step) < 0) return step;
    }
    return first;
  }

  const Plan& plan_;
  std::vector<uint32_t> left_of_step_;          // per step: what it depends on
  std::vector<std::vector<uint32_t>> after_;    // per step: what depends on it
  std::vector<std::vector<uint32_t>> touched_;  // per step: fresh buffers, each once
  std::vector<bool> movable_;                   // per step
  std::vector<uint32_t> uses_;                  // per buffer: steps that touch it
  std::vector<uint32_t> left_;                  // of these, those that did not run
};

}  // namespace

std::vector<Step> order_steps(const Plan& plan, std::vector<Step> steps) {
  std::vector<uint32_t> as_it_is(steps.size());
  std::iota(as_it_is.begin(), as_it_is.end(), 0U);
  Ordering ordering(plan, steps);
  const std::vector<uint32_t> order = ordering.find();
  if (ordering.peak(order) >= ordering.peak(as_it_is)) return steps;
  std::vector<Step> ordered;
  ordered.reserve(steps.size());
  for (const uint32_t step : order) ordered.push_back(std::move(steps[step]));
  return ordered;
}

}  // namespace acc::plan
