#include "csrc/base/stats.h"

#include <map>
#include <mutex>

namespace acc::base {

namespace detail {

CounterCell counter_cells[kCounters];

}  // namespace detail

namespace {

constexpr const char* kNames[] = {
#define ACC_COUNTER_NAME(id, text) text,
    ACC_COUNTERS(ACC_COUNTER_NAME)
#undef ACC_COUNTER_NAME
};

struct KeyedCounters {
  std::mutex mutex;
  std::map<std::string, uint64_t, std::less<>> values;
};

// Never destroyed: threads may still count while the process exits.
KeyedCounters& keyed() {
  static auto* counters = new KeyedCounters;
  return *counters;
}

std::string join(std::string_view group, std::string_view key) {
  std::string text;
  text.reserve(group.size() + 1 + key.size());
  return text.append(group).append("/").append(key);
}

}  // namespace

const char* name(Counter counter) { return kNames[static_cast<size_t>(counter)]; }

void count_keyed(std::string_view group, std::string_view key, uint64_t n) {
  std::string text = join(group, key);
  KeyedCounters& counters = keyed();
  const std::lock_guard lock(counters.mutex);
  auto found = counters.values.find(text);
  if (found == counters.values.end()) {
    if (counters.values.size() >= kMaxKeys) text = join(group, "(other)");
    found = counters.values.try_emplace(std::move(text), 0).first;
  }
  found->second += n;
}

uint64_t value_keyed(std::string_view group, std::string_view key) {
  const std::string text = join(group, key);
  KeyedCounters& counters = keyed();
  const std::lock_guard lock(counters.mutex);
  const auto found = counters.values.find(text);
  return found == counters.values.end() ? 0 : found->second;
}

std::vector<std::pair<std::string, uint64_t>> snapshot_counters() {
  std::vector<std::pair<std::string, uint64_t>> snapshot;
  KeyedCounters& counters = keyed();
  const std::lock_guard lock(counters.mutex);
  snapshot.reserve(kCounters + counters.values.size());
  for (size_t i = 0; i < kCounters; ++i) {
    const auto counter = static_cast<Counter>(i);
    snapshot.emplace_back(name(counter), value(counter));
  }
  snapshot.insert(snapshot.end(), counters.values.begin(), counters.values.end());
  return snapshot;
}

void reset_counters() {
  for (detail::CounterCell& cell : detail::counter_cells) {
    cell.value.store(0, std::memory_order_relaxed);
  }
  KeyedCounters& counters = keyed();
  const std::lock_guard lock(counters.mutex);
  counters.values.clear();
}

}  // namespace acc::base
