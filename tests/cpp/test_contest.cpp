#include "lazy/plan/contest.h"

#include <gtest/gtest.h>

#include "lazy/plan/trial.h"

namespace acc {
namespace {

using plan::Contest;
using plan::Trial;

constexpr double kMs = 1e-3;

// A run of each, in milliseconds; of the plan alone where that decides.
void round(Contest* contest, double ms, double plain_ms) {
  ASSERT_FALSE(contest->plain_is_next());
  contest->note(ms * kMs);
  if (contest->decided()) return;
  ASSERT_TRUE(contest->plain_is_next());
  contest->note(plain_ms * kMs);
}

TEST(Contest, APlanThatIsFastIsSettledAfterThreeRunsOfEach) {
  Contest contest(nullptr);
  for (uint32_t i = 0; i < Trial::kRuns; ++i) {
    EXPECT_FALSE(contest.decided());
    round(&contest, 2, 3);
  }
  EXPECT_TRUE(contest.decided());
  EXPECT_FALSE(contest.plain_is_faster());
}

TEST(Contest, APlanThatIsSlowIsFoundAfterMoreRuns) {
  Contest contest(nullptr);
  uint32_t rounds = 0;
  for (; !contest.decided(); ++rounds) round(&contest, 3, rounds == 4 ? 2 : 2.5);
  EXPECT_EQ(rounds, Trial::kRunsToBeSure);
  EXPECT_TRUE(contest.plain_is_faster());
  EXPECT_DOUBLE_EQ(contest.seconds(), 3 * kMs);
  EXPECT_DOUBLE_EQ(contest.plain_seconds(), 2 * kMs);
}

TEST(Contest, OneQuietRunIsEnough) {
  Contest contest(nullptr);
  for (int i = 0; !contest.decided(); ++i) round(&contest, i == 7 ? 2 : 200, 2);
  EXPECT_FALSE(contest.plain_is_faster());
}

TEST(Contest, SmallDifferencesDoNotCount) {
  Contest percents(nullptr);
  while (!percents.decided()) round(&percents, 2.08, 2);
  EXPECT_FALSE(percents.plain_is_faster());
  Contest microseconds(nullptr);
  while (!microseconds.decided()) round(&microseconds, 8e-3, 4e-3);
  EXPECT_FALSE(microseconds.plain_is_faster());
}

}  // namespace
}  // namespace acc
