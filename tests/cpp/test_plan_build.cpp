#include <gtest/gtest.h>

#include <random>

#include "lazy/graph/print.h"
#include "lazy/passes/dce.h"
#include "lazy/plan/plan.h"
#include "lazy/plan/print.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using plan::Place;
using testing::GraphBuilder;

std::vector<bool> alive(const graph::Graph& graph, std::initializer_list<uint32_t> buffers) {
  std::vector<bool> result(graph.buffers.size());
  for (const uint32_t buffer : buffers) result[buffer] = true;
  return result;
}

TEST(Dce, WhatNobodyCanReachVanishes) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t dead = b.fresh();
  const uint32_t kept = b.fresh();
  b.call("relu", {{x}}, {{dead}});
  b.call("tanh", {{x}}, {{kept}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {kept})),
            (std::vector<bool>{false, true}));
}

TEST(Dce, TheTextBeforeAndAfter) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t dead = b.fresh();
  const uint32_t dead_too = b.fresh();
  const uint32_t kept = b.fresh();
  b.call("relu", {{x}}, {{dead}});
  b.call("tanh", {{dead}}, {{dead_too}});
  b.in_place("add_", {{x}}, {{x}});
  b.call("exp", {{x}}, {{kept}});
  EXPECT_EQ(graph::print(b.graph),
            "%1:f32[4] = relu(%0:f32[4])\n"
            "%2:f32[4] = tanh(%1:f32[4])\n"
            "add_(%0:f32[4], %0:f32[4])\n"
            "%3:f32[4] = exp(%0:f32[4])\n");
  EXPECT_EQ(plan::print(b.graph, passes::eliminate_dead_code(b.graph, alive(b.graph, {kept}))),
            "add_(%0:f32[4], %0:f32[4])\n"
            "%3:f32[4] = exp(%0:f32[4])\n");
}

TEST(Dce, AChainIsKeptFromItsEnd) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("relu", {{x}}, {{y}});
  b.call("tanh", {{y}}, {{z}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {z})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AWriteToAnInputStaysAlthoughItsResultIsDropped) {
  // Batch norm's running statistics in a forward whose output nobody reads.
  GraphBuilder b;
  const uint32_t statistics = b.input();
  const uint32_t x = b.input();
  b.in_place("update", {{statistics}}, {{x}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {})), (std::vector<bool>{true}));
}

TEST(Dce, AWriteThroughAViewKeepsWhatIsReadThroughTheStorage) {
  // w = x.view(...); w.add_(y); w is gone; x is still there.
  GraphBuilder b;
  const uint32_t x = b.fresh(32);
  const uint32_t y = b.input();
  b.call("relu", {{y, 8}}, {{x, 8}});
  b.in_place("add_", {{x, 4, 4}}, {{y}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {x})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AWriteThroughOneInputViewIsReadThroughAnother) {
  GraphBuilder b;
  const uint32_t whole = b.input();
  const uint32_t tail = b.input_view(whole, 8);
  const uint32_t out = b.fresh();
  b.in_place("zero_", {{tail, 2}});
  b.call("relu", {{whole}}, {{out}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {out})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AnOperatorThatMustRunRuns) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.call("_assert_async", {{x}}, {});
  b.last_op().removable = false;
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {})), (std::vector<bool>{true}));
}

TEST(Build, ResultsOfOperatorsWithoutAnOutKernelAreAdoptedAndReleasedAfterTheirLastUse) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("convolution", {{x}}, {{y}});
  b.call("batch_norm", {{y}}, {{z}});
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kAdopted);
  EXPECT_EQ(plan->unfused.steps[0].release, (std::vector<uint32_t>{x}));
  EXPECT_EQ(plan->unfused.steps[1].release, (std::vector<uint32_t>{y}));
}

TEST(Build, IntermediatesWithAnOutKernelLiveInTheArenaAndOutputsOnTheirOwn) {
  static const int kKernel = 0;
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(64);
  const uint32_t z = b.fresh(64);
  b.call("relu", {{x, 16}}, {{y, 16}});
  b.last_op().out_handle = &kKernel;
  b.call("tanh", {{y, 16}}, {{z, 16}});
  b.last_op().out_handle = &kKernel;
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kArena);
  EXPECT_EQ(plan->unfused.places[z], Place::kAllocated);
  EXPECT_EQ(plan->unfused.steps[1].allocate, (std::vector<uint32_t>{z}));
  EXPECT_EQ(plan->unfused.arena_bytes, 256U);
}

TEST(Build, ALargeIntermediateHasABlockOfItsOwnUntilItsLastUse) {
  static const int kKernel = 0;
  constexpr int64_t kElements = 1 << 20;
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(4 * kElements);
  const uint32_t z = b.fresh();
  b.call("expand", {{x}}, {{y, kElements}});
  b.last_op().out_handle = &kKernel;
  b.call("sum", {{y, kElements}}, {{z}});
  b.last_op().out_handle = &kKernel;
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kAllocated);
  EXPECT_EQ(plan->unfused.steps[0].allocate, (std::vector<uint32_t>{y}));
  EXPECT_EQ(plan->unfused.steps[1].release, (std::vector<uint32_t>{y}));
  EXPECT_EQ(plan->unfused.arena_bytes, 0U);
}

TEST(Build, ABufferThatNoRemainingStepTouchesIsNowhere) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  b.call("relu", {{x}}, {{y}});
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {}), {.fuse = false});
  EXPECT_TRUE(plan->unfused.steps.empty());
  EXPECT_EQ(plan->unfused.places[y], Place::kNowhere);
}

// Runs a plan on pretended memory: each arena byte remembers which buffer wrote it last, and a read
// must find the bytes of its own buffer.
TEST(Build, NoStepOverwritesWhatALaterStepReads) {
  static const int kKernel = 0;
  std::mt19937 random(20261121);
  for (int round = 0; round < 300; ++round) {
    GraphBuilder b;
    std::vector<uint32_t> known{b.input()};
    std::vector<uint64_t> sizes{4};
    const size_t nodes = 2 + random() % 40;
    for (size_t i = 0; i < nodes; ++i) {
      const size_t from = random() % known.size();
      const int64_t elements = 1 + static_cast<int64_t>(random() % 300);
      if (random() % 4 == 0) {
        b.in_place("add_", {{known[from], static_cast<int64_t>(sizes[from])}});
        continue;
      }
      const uint32_t result = b.fresh(static_cast<uint64_t>(elements) * 4);
      b.call("op", {{known[from], static_cast<int64_t>(sizes[from])}}, {{result, elements}});
      if (random() % 3 != 0) b.last_op().out_handle = &kKernel;
      known.push_back(result);
      sizes.push_back(static_cast<uint64_t>(elements));
    }
    std::vector<bool> live(b.graph.buffers.size());
    for (size_t i = 1; i < live.size(); ++i) live[i] = random() % 5 == 0;
    const auto plan = plan::build(b.graph, {}, live, {.fuse = false});
    std::vector<int64_t> owner(plan->unfused.arena_bytes, -1);
    for (const plan::Step& step : plan->unfused.steps) {
      const auto uses = graph::uses(plan->program, plan->program.nodes[step.nodes[0]]);
      for (const bool write : {false, true}) {
        for (const graph::Use& use : uses) {
          if (plan->unfused.places[use.buffer] != Place::kArena || use.fresh != write) continue;
          const uint64_t begin = plan->unfused.offsets[use.buffer];
          for (uint64_t at = begin; at < begin + plan->graph.buffers[use.buffer].nbytes; ++at) {
            if (write) owner[at] = use.buffer;
            ASSERT_EQ(owner[at], use.buffer)
                << "round " << round << " step of node " << step.nodes[0];
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace acc
