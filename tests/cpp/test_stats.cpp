#include <gtest/gtest.h>

#include <cctype>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/stats.h"

namespace acc::base {
namespace {

class Stats : public testing::Test {
 protected:
  void SetUp() override { reset_counters(); }
  void TearDown() override { reset_counters(); }
};

// "FlushDataDependent" for "flush_data_dependent".
std::string camel_case(const std::string& text) {
  std::string result;
  bool upper = true;
  for (const char c : text) {
    if (c == '_') {
      upper = true;
      continue;
    }
    result += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    upper = false;
  }
  return result;
}

TEST_F(Stats, CountersStartAtZeroAndAddUp) {
  EXPECT_EQ(value(Counter::Flushes), 0u);
  count(Counter::Flushes);
  count(Counter::Flushes, 4);
  EXPECT_EQ(value(Counter::Flushes), 5u);
  EXPECT_EQ(value(Counter::FlushExplicit), 0u);
}

TEST_F(Stats, NamesAreTheEnumeratorsInSnakeCase) {
#define EXPECT_NAME(id, text)            \
  EXPECT_STREQ(name(Counter::id), text); \
  EXPECT_EQ(camel_case(name(Counter::id)), #id);
  ACC_COUNTERS(EXPECT_NAME)
#undef EXPECT_NAME
}

TEST_F(Stats, TheSnapshotHasEveryCounterInOrderThenTheKeyedOnes) {
  count(Counter::Errors, 7);
  count_keyed("fallback", "aten::foo");
  count_keyed("fallback", "aten::bar", 2);
  const auto snapshot = snapshot_counters();
  ASSERT_EQ(snapshot.size(), kCounters + 2);
  std::set<std::string> names;
  for (size_t i = 0; i < kCounters; ++i) {
    const auto counter = static_cast<Counter>(i);
    EXPECT_EQ(snapshot[i].first, name(counter));
    EXPECT_EQ(snapshot[i].second, counter == Counter::Errors ? 7u : 0u);
    names.insert(snapshot[i].first);
  }
  EXPECT_EQ(names.size(), kCounters);
  EXPECT_EQ(snapshot[kCounters], (std::pair<std::string, uint64_t>("fallback/aten::bar", 2)));
  EXPECT_EQ(snapshot[kCounters + 1], (std::pair<std::string, uint64_t>("fallback/aten::foo", 1)));
}

TEST_F(Stats, KeyedCountersOfDifferentGroupsAreDifferent) {
  count_keyed("fallback", "aten::foo", 3);
  count_keyed("run_now", "aten::foo");
  EXPECT_EQ(value_keyed("fallback", "aten::foo"), 3u);
  EXPECT_EQ(value_keyed("run_now", "aten::foo"), 1u);
  EXPECT_EQ(value_keyed("run_now", "aten::bar"), 0u);
}

TEST_F(Stats, ResetForgetsEverything) {
  count(Counter::Nodes, 3);
  count_keyed("fallback", "aten::foo");
  reset_counters();
  EXPECT_EQ(value(Counter::Nodes), 0u);
  EXPECT_EQ(snapshot_counters().size(), kCounters);
}

TEST_F(Stats, NoCountIsLostBetweenThreads) {
  constexpr uint64_t kEach = 20'000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (uint64_t n = 0; n < kEach; ++n) {
        count(Counter::Nodes);
        if (n % 16 == 0) count_keyed("fallback", "aten::foo");
        if (n % 1024 == 0) snapshot_counters();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(value(Counter::Nodes), 4 * kEach);
  EXPECT_EQ(value_keyed("fallback", "aten::foo"), 4 * kEach / 16);
}

// Keys may hold a Python line: a script that makes new ones must not fill the memory.
TEST_F(Stats, TheNumberOfKeysIsBoundedAndNothingIsLost) {
  for (size_t i = 0; i < kMaxKeys + 50; ++i) count_keyed("line", std::to_string(i));
  EXPECT_EQ(snapshot_counters().size(), kCounters + kMaxKeys + 1);
  EXPECT_EQ(value_keyed("line", "(other)"), 50u);
  count_keyed("line", "0");
  EXPECT_EQ(value_keyed("line", "0"), 2u);
}

}  // namespace
}  // namespace acc::base
