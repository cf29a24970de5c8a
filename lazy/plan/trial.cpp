#include "lazy/plan/trial.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "csrc/base/check.h"

namespace acc::plan {
namespace {

// A kernel is slower only if it is so by a tenth and by more than a clock and a call may differ.
constexpr double kClearly = 1.1;
constexpr double kClearlySeconds = 2e-6;

}  // namespace

Trial::Trial(const std::vector<Step>& unfused, const std::vector<Step>& fused)
    : pair_of_fused_(fused.size(), kNone), pair_of_unfused_(unfused.size(), kNone) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::unordered_map<uint32_t, uint32_t> unfused_of_node;
  for (uint32_t i = 0; i < unfused.size(); ++i) {
    if (unfused[i].kernel == kNoKernel) unfused_of_node.emplace(unfused[i].nodes[0], i);
  }
  for (uint32_t i = 0; i < fused.size(); ++i) {
    if (fused[i].kernel == kNoKernel || !unfused_of_node.contains(fused[i].nodes[0])) continue;
    pair_of_fused_[i] = static_cast<uint32_t>(pairs_.size());
    for (const uint32_t node : fused[i].nodes) {
      pair_of_unfused_[unfused_of_node.at(node)] = pair_of_fused_[i];
    }
    pairs_.push_back({i, kNever, kNever});
  }
  decided_ = pairs_.empty();
}

void Trial::note(std::span<const double> seconds) {
  const bool fused = next_is_fused();
  const std::vector<uint32_t>& pair_of = fused ? pair_of_fused_ : pair_of_unfused_;
  ACC_CHECK(!decided_ && seconds.size() == pair_of.size());
  std::vector<double> sums(pairs_.size(), 0);
  for (size_t i = 0; i < seconds.size(); ++i) {
    if (pair_of[i] != kNone) sums[pair_of[i]] += seconds[i];
  }
  for (size_t i = 0; i < pairs_.size(); ++i) {
    double& best = fused ? pairs_[i].fused : pairs_[i].unfused;
    best = std::min(best, sums[i]);
  }
  ++(fused ? fused_runs_ : unfused_runs_);
  decided_ = unfused_runs_ >= kRunsToBeSure || (unfused_runs_ >= kRuns && slower().empty());
}

std::vector<Trial::Slower> Trial::slower() const {
  std::vector<Slower> found;
  for (const Pair& pair : pairs_) {
    if (pair.fused > pair.unfused * kClearly && pair.fused > pair.unfused + kClearlySeconds) {
      found.push_back({pair.step, pair.fused, pair.unfused});
    }
  }
  return found;
}

}  // namespace acc::plan
