#include "lazy/passes/min_cut.h"

#include <algorithm>
#include <limits>

namespace acc::passes {
namespace {

constexpr uint32_t kUnreached = std::numeric_limits<uint32_t>::max();

}  // namespace

MinCut::MinCut(uint32_t things) : left_(things), right_(things + 1), leaves_(things + 2) {}

void MinCut::add(uint32_t from, uint32_t to, int64_t forth, int64_t back) {
  leaves_[from].push_back(static_cast<uint32_t>(edges_.size()));
  edges_.push_back({to, forth});
  leaves_[to].push_back(static_cast<uint32_t>(edges_.size()));
  edges_.push_back({from, back});
}

bool MinCut::find_levels() {
  levels_.assign(leaves_.size(), kUnreached);
  levels_[left_] = 0;
  std::vector<uint32_t> queue{left_};
  for (size_t i = 0; i < queue.size(); ++i) {
    for (const uint32_t edge : leaves_[queue[i]]) {
      const Edge& e = edges_[edge];
      if (e.room == 0 || levels_[e.to] != kUnreached) continue;
      levels_[e.to] = levels_[queue[i]] + 1;
      queue.push_back(e.to);
    }
  }
  return levels_[right_] != kUnreached;
}

int64_t MinCut::push(uint32_t from, int64_t at_most) {
  if (from == right_) return at_most;
  for (uint32_t& i = next_[from]; i < leaves_[from].size(); ++i) {
    const uint32_t edge = leaves_[from][i];
    const Edge e = edges_[edge];
    if (e.room == 0 || levels_[e.to] != levels_[from] + 1) continue;
    const int64_t pushed = push(e.to, std::min(at_most, e.room));
    if (pushed == 0) continue;
    edges_[edge].room -= pushed;
    edges_[edge ^ 1U].room += pushed;
    return pushed;
  }
  return 0;
}

std::vector<bool> MinCut::run() {
  while (find_levels()) {
    next_.assign(leaves_.size(), 0);
    while (push(left_, kNever) > 0) {
    }
  }
  // On the right is what can still send something there.
  std::vector<bool> right(leaves_.size(), false);
  right[right_] = true;
  std::vector<uint32_t> queue{right_};
  for (size_t i = 0; i < queue.size(); ++i) {
    for (const uint32_t edge : leaves_[queue[i]]) {
      const uint32_t from = edges_[edge].to;
      if (right[from] || edges_[edge ^ 1U].room == 0) continue;
      right[from] = true;
      queue.push_back(from);
    }
  }
  right.resize(left_);
  return right;
}

}  // namespace acc::passes
