#include "lazy/plan/in_place.h"

#include <gtest/gtest.h>

#include "lazy/passes/switches.h"
#include "lazy/plan/describe.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using plan::Place;
using plan::Reuse;
using testing::GraphBuilder;

constexpr int64_t kElements = 1 << 16;
constexpr uint64_t kBytes = 4 * kElements;
const int kOutKernel = 0;

std::shared_ptr<plan::Plan> build(const GraphBuilder& b, std::initializer_list<uint32_t> outputs,
                                  bool fuse = false) {
  std::vector<bool> alive(b.graph.buffers.size());
  for (const uint32_t buffer : outputs) alive[buffer] = true;
  return plan::build(b.graph, {}, std::move(alive), {.fuse = fuse});
}

// y = tanh(convolution(x)), where the second is made in place of the first if it may.
struct Chain {
  GraphBuilder b;
  uint32_t x = b.input();
  uint32_t a = b.fresh(kBytes);
  uint32_t y = b.fresh(kBytes);

  Chain() {
    b.call("convolution", {{x}}, {{a, kElements}});
    b.call("aten::tanh", {{a, kElements}}, {{y, kElements}});
    b.last_op().arguments[0].name = "self";
    b.last_op().pointwise = true;
    b.last_op().out_handle = &kOutKernel;
  }
};

TEST(InPlace, AnElementwiseResultTakesTheMemoryOfAnOperandThatEndsThere) {
  const Chain chain;
  const auto plan = build(chain.b, {chain.y});
  EXPECT_EQ(plan->unfused.places[chain.a], Place::kAdopted);
  EXPECT_EQ(plan->unfused.places[chain.y], Place::kAllocated);
  EXPECT_EQ(plan->unfused.steps[1].reuse, (std::vector<Reuse>{{chain.y, chain.a}}));
  EXPECT_TRUE(plan->unfused.steps[1].allocate.empty());
  EXPECT_EQ(plan->unfused.steps[1].release, (std::vector<uint32_t>{chain.a}));
  EXPECT_EQ(plan::describe(*plan, plan->unfused).peak_bytes, kBytes);
}

// Each step, and the memory that it gets, takes over and gives back.
std::string text_of(const plan::Plan& plan) {
  std::string text;
  for (const plan::Step& step : plan.unfused.steps) {
    text += graph::print(plan.program, plan.program.nodes[step.nodes[0]]);
    for (const uint32_t made : step.allocate) text += " +%" + std::to_string(made);
    for (const Reuse& reuse : step.reuse) {
      text += " %" + std::to_string(reuse.buffer) + "=%" + std::to_string(reuse.of);
    }
    for (const uint32_t ended : step.release) text += " -%" + std::to_string(ended);
    text += '\n';
  }
  return text;
}

TEST(InPlace, TheTextBeforeAndAfter) {
  const Chain chain;
  passes::skip("alias");
  const auto before = build(chain.b, {chain.y});
  passes::skip("");
  EXPECT_EQ(text_of(*before),
            "%1:f32[65536] = convolution(%0:f32[4]) -%0\n"
            "%2:f32[65536] = aten::tanh(%1:f32[65536]) +%2 -%1\n");
  EXPECT_EQ(text_of(*build(chain.b, {chain.y})),
            "%1:f32[65536] = convolution(%0:f32[4]) -%0\n"
            "%2:f32[65536] = aten::tanh(%1:f32[65536]) %2=%1 -%1\n");
}

TEST(InPlace, WhatIsWantedLaterIsNotOverwritten) {
  const Chain kept;
  EXPECT_TRUE(build(kept.b, {kept.a, kept.y})->unfused.steps[1].reuse.empty());
  Chain read;
  const uint32_t z = read.b.fresh();
  read.b.call("sum", {{read.a, kElements}}, {{z}});
  EXPECT_TRUE(build(read.b, {read.y, z})->unfused.steps[1].reuse.empty());
}

TEST(InPlace, OtherOperatorsAndOtherPlacesAreNot) {
  Chain not_pointwise;
  not_pointwise.b.last_op().pointwise = false;
  EXPECT_TRUE(build(not_pointwise.b, {not_pointwise.y})->unfused.steps[1].reuse.empty());

  // The second half of a buffer twice as large, and a buffer of another size.
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t a = b.fresh(kBytes);
  const uint32_t y = b.fresh(kBytes / 2);
  b.call("convolution", {{x}}, {{a, kElements}});
  b.call("aten::tanh", {{a, kElements / 2, kElements / 2}}, {{y, kElements / 2}});
  b.last_op().arguments[0].name = "self";
  b.last_op().pointwise = true;
  b.last_op().out_handle = &kOutKernel;
  EXPECT_TRUE(build(b, {y})->unfused.steps[1].reuse.empty());
}

// A step of one kernel that reads buffer 0 and makes buffer 1, in two loops.
struct Kernel {
  plan::Plan plan;
  plan::Step step;

  Kernel() {
    codegen::KernelSpec spec;
    spec.loops = 2;
    spec.operands = {{6, codegen::Walk::kContiguous, false}, {6, codegen::Walk::kContiguous, true}};
    plan.kernels = {spec};
    step.kernel = 0;
    step.launches = {{{{0, 0, false}, {1, 0, true}}, {8, 4, 4, 1, 4, 1}, {}, 32}};
  }
  bool may() const { return plan::may_overwrite(plan, step, 1, 0); }
};

TEST(InPlace, AKernelMayWhereItWalksThroughBothAlike) {
  Kernel kernel;
  EXPECT_TRUE(kernel.may());
  // A loop of one turn steps nowhere.
  kernel.step.launches[0].geometry = {8, 1, 4, 7, 4, 1};
  kernel.step.launches[0].elements = 8;
  EXPECT_TRUE(kernel.may());
}

TEST(InPlace, AKernelMayNotWhereItWouldReadWhatItWrote) {
  Kernel transposed;
  transposed.step.launches[0].geometry = {8, 4, 1, 8, 4, 1};
  EXPECT_FALSE(transposed.may());
  Kernel broadcast;
  broadcast.step.launches[0].geometry = {8, 4, 0, 1, 4, 1};
  EXPECT_FALSE(broadcast.may());
  Kernel shifted;
  shifted.step.launches[0].operands[0].byte_offset = 4;
  EXPECT_FALSE(shifted.may());
  Kernel other_type;
  other_type.plan.kernels[0].operands[0].dtype = 3;
  EXPECT_FALSE(other_type.may());
  Kernel reduced;
  reduced.step.launches[0].elements = 8;
  EXPECT_FALSE(reduced.may());
  Kernel reduced_one_by_one;
  reduced_one_by_one.plan.kernels[0].reduced = 1;
  EXPECT_FALSE(reduced_one_by_one.may());
  Kernel twice;  // the second view of the same memory is shifted
  twice.plan.kernels[0].operands.push_back({6, codegen::Walk::kContiguous, false});
  twice.step.launches[0].operands.push_back({0, 4, false});
  twice.step.launches[0].geometry = {8, 4, 4, 1, 4, 1, 4, 1};
  EXPECT_FALSE(twice.may());
  Kernel stored;  // somebody sees what it writes there
  stored.step.launches[0].operands[0].stored = true;
  EXPECT_FALSE(stored.may());
}

TEST(InPlace, AnotherLaunchOfTheStepMayStillReadIt) {
  Kernel kernel;
  kernel.step.launches.push_back({{{0, 0, false}, {2, 0, true}}, {8, 4, 4, 1, 4, 1}, {}, 32});
  EXPECT_FALSE(kernel.may());
  kernel.step.launches[1].operands[0].buffer = 3;
  EXPECT_TRUE(kernel.may());
}

TEST(InPlace, AChainOfKernelsRunsInOneBlock) {
  GraphBuilder b;
  const uint32_t x = b.input();
  std::vector<uint32_t> made;
  uint32_t last = x;
  for (int i = 0; i < 3; ++i) {
    made.push_back(b.fresh(kBytes));
    b.call("convolution", {{last, kElements}}, {{made.back(), kElements}});
    last = b.fresh(kBytes);
    b.call("aten::tanh", {{made.back(), kElements}}, {{last, kElements}});
    b.last_op().arguments[0].name = "self";
  }
  const auto plan = build(b, {last}, /*fuse=*/true);
  ASSERT_FALSE(plan->kernels.empty());
  plan::use_kernels(*plan, {true});
  size_t reused = 0;
  for (const plan::Step& step : plan->fused.steps) reused += step.reuse.size();
  EXPECT_EQ(reused, 3U);
}

}  // namespace
}  // namespace acc
