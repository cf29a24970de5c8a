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

bool MinCut::push() {
  path_.clear();
  for (uint32_t at = left_; at != right_;) {
    uint32_t& i = next_[at];
    const auto leads_on = [&](uint32_t edge) {
      return edges_[edge].room != 0 && levels_[edges_[edge].to] == levels_[at] + 1;
    };
    while (i < leaves_[at].size() && !leads_on(leaves_[at][i])) ++i;
    if (i < leaves_[at].size()) {
      path_.push_back(leaves_[at][i]);
      at = edges_[path_.back()].to;
      continue;
    }
    if (path_.empty()) return false;
    at = edges_[path_.back() ^ 1U].to;  // nothing goes on from there: back, and not there again
    path_.pop_back();
    ++next_[at];
  }
  int64_t pushed = kNever;
  for (const uint32_t edge : path_) pushed = std::min(pushed, edges_[edge].room);
  for (const uint32_t edge : path_) {
    edges_[edge].room -= pushed;
    edges_[edge ^ 1U].room += pushed;
  }
  return true;
}

std::vector<bool> MinCut::run() {
  while (find_levels()) {
    next_.assign(leaves_.size(), 0);
    while (push()) {
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
