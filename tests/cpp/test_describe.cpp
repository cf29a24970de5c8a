#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lazy/plan/describe.h"
#include "lazy/plan/plan.h"
#include "lazy/plan/schedule.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using plan::Description;
using testing::GraphBuilder;

constexpr int64_t kElements = 1 << 16;
constexpr uint64_t kBytes = 4 * kElements;

std::vector<bool> alive(const graph::Graph& graph, std::initializer_list<uint32_t> buffers) {
  std::vector<bool> result(graph.buffers.size());
  for (const uint32_t buffer : buffers) result[buffer] = true;
  return result;
}

// x -> exp -> a -> exp -> b -> conv -> c -> exp -> y, and a node that nobody needs. The first two
// are one kernel, so that `a` stays in registers; the last one is worth a kernel by itself.
struct Chain {
  GraphBuilder b;
  uint32_t x = b.input();
  uint32_t a = b.fresh(kBytes);
  uint32_t c0 = b.fresh(kBytes);
  uint32_t c1 = b.fresh(kBytes);
  uint32_t y = b.fresh(kBytes);
  uint32_t dead = b.fresh(kBytes);

  // One for all tests: formulas are kept by operator, and operators live for ever.
  static const Chain& get() {
    static const Chain& chain = *new Chain;
    return chain;
  }

  Chain() {
    call("aten::exp", x, a, 7);
    call("aten::exp", a, c0, 8);
    call("convolution", c0, c1, 9);
    call("aten::exp", x, dead, 10);
    call("aten::exp", c1, y, 11);
  }

  std::shared_ptr<plan::Plan> build(bool fuse, const plan::Observer& observer = nullptr) const {
    return plan::build(b.graph, {}, alive(b.graph, {y}), {.fuse = fuse}, observer);
  }

 private:
  void call(const std::string& name, uint32_t from, uint32_t to, uint32_t source) {
    const size_t node = b.call(name, {{from, kElements}}, {{to, kElements}});
    b.last_op().arguments[0].name = "self";
    b.graph.nodes[node].source = source;
  }
};

// Lifetimes as the executor finds them: from the step that makes a buffer to the one that gives it
// back.
void expect_lifetimes(const Description& description, const plan::Schedule& schedule) {
  size_t told = 0;
  for (uint32_t i = 0; i < schedule.steps.size(); ++i) {
    for (const uint32_t buffer : schedule.steps[i].allocate) {
      EXPECT_EQ(description.buffers[buffer].first, i) << "buffer " << buffer;
      EXPECT_STREQ(description.buffers[buffer].place, "own");
    }
    for (const uint32_t buffer : schedule.steps[i].release) {
      ++told;
      EXPECT_EQ(description.buffers[buffer].last, i) << "buffer " << buffer;
      EXPECT_FALSE(description.buffers[buffer].output);
    }
  }
  EXPECT_GT(told, 0U);
}

TEST(Describe, AFusedPlanSaysWhatItsKernelsComputeAndWhatStaysInRegisters) {
  const Chain& chain = Chain::get();
  const auto plan = chain.build(/*fuse=*/true);
  ASSERT_FALSE(plan->kernels.empty());
  plan::use_kernels(*plan, std::vector<bool>(plan->kernels.size(), true));
  const Description made = plan::describe(*plan, plan->fused);

  EXPECT_EQ(made.recorded, 5U);
  ASSERT_EQ(made.nodes.size(), 4U);
  ASSERT_EQ(made.steps.size(), 3U);
  EXPECT_EQ(made.steps[0].nodes, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(made.steps[0].kernel, 0);
  EXPECT_EQ(made.steps[0].launches, 1U);
  EXPECT_EQ(made.steps[1].kernel, -1);
  EXPECT_EQ(made.nodes[1].step, 0U);
  EXPECT_EQ(made.nodes[2].step, 1U);
  EXPECT_FALSE(made.waits_for_kernels);

  EXPECT_EQ(made.nodes[0].op, "aten::exp");
  EXPECT_EQ(made.nodes[0].text, "%1:f32[65536] = aten::exp(%0:f32[65536])");
  EXPECT_EQ(made.nodes[0].source, 7U);
  EXPECT_EQ(made.nodes[0].reads, (std::vector<uint32_t>{chain.x}));
  EXPECT_EQ(made.nodes[0].writes, (std::vector<uint32_t>{chain.a}));

  EXPECT_STREQ(made.buffers[chain.x].place, "given");
  EXPECT_STREQ(made.buffers[chain.x].kind, "input");
  EXPECT_EQ(made.buffers[chain.x].bytes, kBytes);
  EXPECT_STREQ(made.buffers[chain.a].place, "none");
  EXPECT_STREQ(made.buffers[chain.c0].place, "own");
  EXPECT_STREQ(made.buffers[chain.c1].place, "adopted");
  EXPECT_STREQ(made.buffers[chain.dead].place, "none");
  EXPECT_TRUE(made.buffers[chain.y].output);
  expect_lifetimes(made, plan->fused);

  EXPECT_EQ(made.kernels.size(), plan->kernels.size());
  EXPECT_EQ(made.kernels[0].operands, 2U);
}

TEST(Describe, WhatIsHeldGoesWithTheLifetimes) {
  const Chain& chain = Chain::get();
  const auto plan = chain.build(/*fuse=*/true);
  plan::use_kernels(*plan, std::vector<bool>(plan->kernels.size(), true));
  const Description made = plan::describe(*plan, plan->fused);
  ASSERT_EQ(made.steps.size(), 3U);
  EXPECT_EQ(made.arena_bytes, 0U);
  EXPECT_EQ(made.steps[0].held_bytes, kBytes);      // c0
  EXPECT_EQ(made.steps[1].held_bytes, 2 * kBytes);  // c0, c1
  EXPECT_EQ(made.steps[2].held_bytes, kBytes);      // y, where c1 was
  EXPECT_EQ(made.peak_bytes, 2 * kBytes);
}

TEST(Describe, TheFormWithoutKernelsHasAStepPerOperatorAndSaysThatKernelsAreComing) {
  const Chain& chain = Chain::get();
  const auto plan = chain.build(/*fuse=*/true);
  const Description made = plan::describe(*plan, plan->unfused);
  EXPECT_TRUE(made.waits_for_kernels);
  ASSERT_EQ(made.steps.size(), 4U);
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(made.steps[i].nodes, (std::vector<uint32_t>{i}));
    EXPECT_EQ(made.steps[i].kernel, -1);
  }
  EXPECT_STREQ(made.buffers[chain.a].place, "adopted");
  expect_lifetimes(made, plan->unfused);
}

TEST(Describe, TheArenaIsHeldThroughoutAndItsBuffersHaveOffsets) {
  static const int kKernel = 0;
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t a = b.fresh(64);
  const uint32_t c = b.fresh(64);
  const uint32_t y = b.fresh(64);
  for (const auto& [from, to] : {std::pair{x, a}, {a, c}, {c, y}}) {
    b.call("relu", {{from, 16}}, {{to, 16}});
    b.last_op().out_handle = &kKernel;
  }
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {y}), {.fuse = false});
  const Description made = plan::describe(*plan, plan->unfused);
  EXPECT_STREQ(made.buffers[a].place, "arena");
  EXPECT_EQ(made.buffers[a].first, 0U);
  EXPECT_EQ(made.buffers[a].last, 1U);
  EXPECT_NE(made.buffers[a].offset, made.buffers[c].offset);
  EXPECT_EQ(made.arena_bytes, plan->unfused.arena_bytes);
  EXPECT_EQ(made.steps[0].held_bytes, made.arena_bytes);
  EXPECT_EQ(made.steps[2].held_bytes, made.arena_bytes + 64);
  EXPECT_EQ(made.peak_bytes, made.arena_bytes + 64);
}

TEST(Describe, TimesAreThoseOfTheSchedule) {
  const Chain& chain = Chain::get();
  const auto plan = chain.build(/*fuse=*/false);
  EXPECT_LT(plan::describe(*plan, plan->unfused).steps[0].seconds, 0);
  plan->unfused.seconds = {1e-3, 2e-3, 3e-3, -1};
  plan->unfused.timed_runs = 2;
  const Description made = plan::describe(*plan, plan->unfused);
  EXPECT_EQ(made.timed_runs, 2U);
  EXPECT_EQ(made.steps[1].seconds, 2e-3);
  EXPECT_LT(made.steps[3].seconds, 0);
}

TEST(Describe, APlanThatIsEmptyIsDescribed) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.call("relu", {{x}}, {{b.fresh()}});
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {}), {.fuse = false});
  const Description made = plan::describe(*plan, plan->unfused);
  EXPECT_EQ(made.recorded, 1U);
  EXPECT_TRUE(made.nodes.empty());
  EXPECT_EQ(made.peak_bytes, 0U);
}

TEST(Observer, EachPassIsToldWithTheGraphAfterIt) {
  const Chain& chain = Chain::get();
  std::vector<std::pair<std::string, std::string>> told;
  chain.build(/*fuse=*/true,
              [&](const char* pass, const std::string& graph) { told.emplace_back(pass, graph); });
  const std::string first =
      "%1:f32[65536] = aten::exp(%0:f32[65536])\n"
      "%2:f32[65536] = aten::exp(%1:f32[65536])\n"
      "%3:f32[65536] = convolution(%2:f32[65536])\n";
  const std::string last = "%4:f32[65536] = aten::exp(%3:f32[65536])\n";
  std::vector<std::pair<std::string, std::string>> expected{
      {"recorded", first + "%5:f32[65536] = aten::exp(%0:f32[65536])\n" + last}};
  for (const char* pass : {"dce", "lists", "split", "cse", "copies", "rows", "widen", "layout",
                           "products", "accumulate"}) {
    expected.emplace_back(pass, first + last);
  }
  const std::string inside =
      " {\n"
      "  %1:f32[65536] = aten::exp(%0:f32[65536])\n"
      "  %2:f32[65536] = aten::exp(%1:f32[65536])\n"
      "}\n"
      "%3:f32[65536] = convolution(%2:f32[65536])\n";
  expected.emplace_back("fuse", "loops 0" + inside + last);
  expected.emplace_back("recompute", "loops 0" + inside + last);
  expected.emplace_back("batch", "kernel 0" + inside + "kernel 1 {\n  " + last + "}\n");
  EXPECT_EQ(told, expected);
}

}  // namespace
}  // namespace acc
