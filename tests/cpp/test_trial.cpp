#include "lazy/plan/trial.h"

#include <gtest/gtest.h>

#include "lazy/plan/plan.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using plan::Step;
using plan::Trial;

Step aten(uint32_t node) {
  Step step;
  step.nodes = {node};
  return step;
}

Step kernel(std::vector<uint32_t> nodes) {
  Step step;
  step.nodes = std::move(nodes);
  step.kernel = 0;
  return step;
}

constexpr double kMs = 1e-3;

// Five nodes; kernels compute 0 and 2, and 3 and 4.
struct Two {
  std::vector<Step> unfused{aten(0), aten(1), aten(2), aten(3), aten(4)};
  std::vector<Step> fused{aten(1), kernel({0, 2}), kernel({3, 4})};
  Trial trial{unfused, fused};

  // A run of each schedule, in milliseconds of its steps.
  void round(std::array<double, 3> fused_ms, std::array<double, 5> unfused_ms) {
    ASSERT_TRUE(trial.next_is_fused());
    for (double& each : fused_ms) each *= kMs;
    for (double& each : unfused_ms) each *= kMs;
    trial.note(fused_ms);
    if (trial.decided()) return;
    ASSERT_FALSE(trial.next_is_fused());
    trial.note(unfused_ms);
  }
};

TEST(Trial, FastKernelsAreSettledAfterThreeRunsOfEach) {
  Two two;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(two.trial.decided());
    two.round({5, 1, 1}, {1, 5, 1, 1, 1});
  }
  EXPECT_TRUE(two.trial.decided());
  EXPECT_TRUE(two.trial.slower().empty());
}

TEST(Trial, AKernelThatIsSlowerThanItsNodesTogetherIsFoundAfterMoreRuns) {
  Two two;
  int rounds = 0;
  for (; !two.trial.decided(); ++rounds) two.round({5, 3, 1}, {1, 5, 1, 1, 1});
  EXPECT_EQ(rounds, 10);
  const auto slower = two.trial.slower();
  ASSERT_EQ(slower.size(), 1U);
  EXPECT_EQ(slower[0].step, 1U);
  EXPECT_DOUBLE_EQ(slower[0].seconds, 3 * kMs);
  EXPECT_DOUBLE_EQ(slower[0].unfused_seconds, 2 * kMs);
}

TEST(Trial, OneQuietRunOfEachIsEnough) {
  Two two;
  // A busy neighbour makes whatever runs take a hundred times as long, except once each.
  for (int i = 0; !two.trial.decided(); ++i) {
    const double kernel_ms = i == 7 ? 1 : 100;
    const double node_ms = i == 2 ? 1 : 100;
    two.round({5, kernel_ms, 1}, {node_ms, 5, node_ms, 1, 1});
  }
  EXPECT_TRUE(two.trial.slower().empty());
}

TEST(Trial, LuckOfSingleNodesInDifferentRunsDoesNotAddUp) {
  Two two;
  // Either node is fast in some runs, never both: together they take 3 ms at best, as the kernel.
  for (int i = 0; !two.trial.decided(); ++i) {
    two.round({5, 3, 1}, {i % 2 == 0 ? 1.0 : 2.0, 5, i % 2 == 0 ? 2.0 : 1.0, 1, 1});
  }
  EXPECT_TRUE(two.trial.slower().empty());
}

TEST(Trial, SmallDifferencesDoNotCount) {
  Two percents;
  while (!percents.trial.decided()) percents.round({5, 2.15, 1}, {1, 5, 1, 1, 1});
  EXPECT_TRUE(percents.trial.slower().empty());
  Two microseconds;
  while (!microseconds.trial.decided()) microseconds.round({5, 3e-3, 1}, {1e-3, 5, 1e-3, 1, 1});
  EXPECT_TRUE(microseconds.trial.slower().empty());
}

TEST(Trial, WithoutKernelsThereIsNothingToDecide) {
  const std::vector<Step> steps{aten(0), aten(1)};
  EXPECT_TRUE(Trial(steps, steps).decided());
}

TEST(Trial, AKernelThatIsInBothIsNotCompared) {
  const std::vector<Step> unfused{kernel({0, 2}), aten(1), aten(3), aten(4)};
  const std::vector<Step> fused{aten(1), kernel({0, 2}), kernel({3, 4})};
  Trial trial{unfused, fused};
  while (!trial.decided()) {
    trial.note(std::vector<double>{5 * kMs, 9 * kMs, 3 * kMs});
    trial.note(std::vector<double>{1 * kMs, 5 * kMs, 1 * kMs, 1 * kMs});
  }
  const auto slower = trial.slower();
  ASSERT_EQ(slower.size(), 1U);
  EXPECT_EQ(slower[0].step, 2U);
  EXPECT_DOUBLE_EQ(slower[0].unfused_seconds, 2 * kMs);
}

TEST(Trial, KernelsThatDrawAreInBothSchedules) {
  testing::GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(64);
  const uint32_t z = b.fresh(64);
  const uint32_t sum = b.fresh(64);
  b.call("acc::native_dropout", {{x, 16}}, {{y, 16}});
  for (const char* name : {"seed", "offset"}) b.last_op().arguments.emplace_back().name = name;
  b.call("tanh", {{y, 16}}, {{z, 16}});
  b.call("relu", {{z, 16}}, {{sum, 16}});
  const auto plan = plan::build(b.graph, {}, b.alive({sum}), {.fuse = false});
  EXPECT_EQ(plan::drawn_bytes(*plan), 0U);  // an operator draws
  plan->fused.steps = {kernel({0, 1}), kernel({2})};
  plan->fused.steps[0].launches = {{{{x, 0, false}, {z, 0, true}}, {16, 1, 1}, {}, 16}};
  plan->fused.steps[1].launches = {{{{z, 0, false}, {sum, 0, true}}, {16, 1, 1}, {}, 16}};
  EXPECT_EQ(plan::drawn_bytes(*plan), 64U);
  plan::keep_drawing(*plan);
  ASSERT_EQ(plan->unfused.steps.size(), 2U);
  EXPECT_EQ(plan->unfused.steps[0].kernel, 0U);
  EXPECT_EQ(plan->unfused.steps[1].kernel, plan::kNoKernel);
  EXPECT_EQ(plan->unfused.places[y], plan::Place::kNowhere);
  plan->fused.steps = {kernel({2})};
  plan::keep_drawing(*plan);  // nothing draws: it is as it was
  EXPECT_EQ(plan->unfused.steps.size(), 2U);
}

// What is done with the answer: the nodes come back in order, where their kernel was, and the
// memory between them with them.
TEST(Trial, TakenApartAStepIsItsNodes) {
  testing::GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(64);
  const uint32_t z = b.fresh(64);
  b.call("relu", {{x, 16}}, {{y, 16}});
  b.call("tanh", {{y, 16}}, {{z, 16}});
  const auto plan = plan::build(b.graph, {}, {false, false, true}, {.fuse = false});
  plan->fused.steps = {kernel({0, 1})};
  plan->fused.steps[0].launches = {{{{x, 0, false}, {z, 0, true}}, {16, 1, 1}, {}, 16}};
  plan::take_apart(*plan, {false});
  EXPECT_EQ(plan->fused.places[y], plan::Place::kNowhere);
  ASSERT_EQ(plan->fused.steps.size(), 1U);
  plan::take_apart(*plan, {true});
  ASSERT_EQ(plan->fused.steps.size(), 2U);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(plan->fused.steps[i].nodes, std::vector<uint32_t>{i});
    EXPECT_EQ(plan->fused.steps[i].kernel, plan::kNoKernel);
    EXPECT_TRUE(plan->fused.steps[i].launches.empty());
  }
  EXPECT_EQ(plan->fused.places[y], plan::Place::kAdopted);
}

}  // namespace
}  // namespace acc
