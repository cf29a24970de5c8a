#include "lazy/plan/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lazy/graph/edges.h"
#include "lazy/passes/switches.h"
#include "lazy/plan/describe.h"
#include "lazy/plan/print.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using testing::GraphBuilder;
using testing::Vector;

constexpr int64_t kLarge = 1 << 18;  // elements

struct Ordered {
  std::vector<uint32_t> nodes;
  uint64_t peak;
  std::string text;
};

// The nodes of the unfused schedule in their order, and the most that it holds.
Ordered build(const GraphBuilder& b, const std::vector<uint32_t>& outputs, const char* skip) {
  passes::skip(skip);
  std::vector<bool> alive(b.graph.buffers.size());
  for (const uint32_t buffer : outputs) alive[buffer] = true;
  const auto plan = plan::build(b.graph, {}, std::move(alive), {.fuse = false});
  passes::skip("");
  Ordered made{{},
               plan::describe(*plan, plan->unfused).peak_bytes,
               plan::print(plan->program, plan->unfused.steps)};
  for (const plan::Step& step : plan->unfused.steps) made.nodes.push_back(step.nodes[0]);
  return made;
}

// The backward of two linear layers with an activation between: products for the operand's gradient
// and for the weight's, in the order in which autograd calls them.
struct Backward {
  GraphBuilder b;
  uint32_t x = b.input();
  uint32_t before = b.fresh(4 * kLarge);  // the activation
  uint32_t after = b.fresh(4 * kLarge);
  uint32_t out = b.fresh(4 * kLarge / 4);
  uint32_t grad_after = b.fresh(4 * kLarge);
  uint32_t grad_weight = b.fresh(4 * kLarge / 8);
  uint32_t grad_before = b.fresh(4 * kLarge);

  explicit Backward(bool removable = true) {
    b.call("mm", {{x}}, {{before, kLarge}});
    b.call("gelu", {{before, kLarge}}, {{after, kLarge}});
    b.call("mm", {{after, kLarge}}, {{out, kLarge / 4}});
    b.call("mm", {{out, kLarge / 4}}, {{grad_after, kLarge}});
    b.call("mm", {{out, kLarge / 4}, {after, kLarge}}, {{grad_weight, kLarge / 8}});
    b.last_op().removable = removable;
    b.call("gelu_backward", {{grad_after, kLarge}, {before, kLarge}}, {{grad_before, kLarge}});
  }
};

TEST(Order, OfTwoProductsTheOneFirstThatEndsAnOperand) {
  const Backward backward;
  const auto before = build(backward.b, {backward.grad_weight, backward.grad_before}, "order");
  const auto after = build(backward.b, {backward.grad_weight, backward.grad_before}, "");
  EXPECT_EQ(before.nodes, (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(after.nodes, (std::vector<uint32_t>{0, 1, 2, 4, 3, 5}));
  EXPECT_LT(after.peak, before.peak);
}

TEST(Order, TheTextBeforeAndAfter) {
  GraphBuilder b;
  const uint32_t x = b.input(), sum = b.fresh(), mean = b.fresh();
  const uint32_t left = b.fresh(4 * kLarge), right = b.fresh(4 * kLarge);
  b.call("exp", {{x}}, {{left, kLarge}});
  b.call("sin", {{x}}, {{right, kLarge}});
  b.call("mean", {{right, kLarge}}, {{mean}});
  b.call("sum", {{left, kLarge}}, {{sum}});
  EXPECT_EQ(build(b, {sum, mean}, "order").text,
            "%3:f32[262144] = exp(%0:f32[4])\n"
            "%4:f32[262144] = sin(%0:f32[4])\n"
            "%2:f32[4] = mean(%4:f32[262144])\n"
            "%1:f32[4] = sum(%3:f32[262144])\n");
  EXPECT_EQ(build(b, {sum, mean}, "").text,
            "%3:f32[262144] = exp(%0:f32[4])\n"
            "%1:f32[4] = sum(%3:f32[262144])\n"
            "%4:f32[262144] = sin(%0:f32[4])\n"
            "%2:f32[4] = mean(%4:f32[262144])\n");
}

TEST(Order, WhatMustRunDoesNotMoveUp) {
  const Backward backward(/*removable=*/false);
  const auto made = build(backward.b, {backward.grad_weight, backward.grad_before}, "");
  EXPECT_EQ(made.nodes, (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
}

TEST(Order, ChangesOnlyWhereSomethingIsWon) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t x1 = b.fresh(4 * kLarge);
  const uint32_t x2 = b.fresh(4 * kLarge);
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("one", {{x}}, {{x1, kLarge}});
  b.call("one", {{x}}, {{x2, kLarge}});
  b.call("sum", {{x2, kLarge}}, {{y}});
  b.call("sum", {{x1, kLarge}}, {{z}});
  b.call("one", {{x}}, {});
  b.last_op().removable = false;
  // The sum of x1 need not wait until x2 is there too; with both kept, it may.
  EXPECT_EQ(build(b, {y, z}, "").nodes, (std::vector<uint32_t>{0, 3, 1, 2, 4}));
  EXPECT_EQ(build(b, {x1, x2, y, z}, "").nodes, (std::vector<uint32_t>{0, 1, 2, 3, 4}));
}

TEST(Order, EveryDependenceIsKeptAndThePeakIsNeverHigher) {
  std::mt19937 random(20261122);
  size_t changed = 0;
  for (int round = 0; round < 300; ++round) {
    GraphBuilder b;
    std::vector<Vector> known{{b.input(), 4}};
    const size_t nodes = 2 + random() % 60;
    for (size_t i = 0; i < nodes; ++i) {
      const Vector one = known[random() % known.size()];
      const Vector other = known[known.size() - 1 - random() % std::min<size_t>(4, known.size())];
      if (random() % 8 == 0) {
        b.in_place("add_", {one}, {other});
        continue;
      }
      const int64_t elements = kLarge / static_cast<int64_t>(1 + random() % 9);
      const uint32_t made = b.fresh(4 * static_cast<uint64_t>(elements));
      b.call("op", {one, other}, {{made, elements}});
      if (random() % 16 == 0) b.last_op().removable = false;
      known.push_back({made, elements});
    }
    std::vector<uint32_t> outputs;
    for (uint32_t i = 1; i < b.graph.buffers.size(); ++i) {
      if (random() % 5 == 0) outputs.push_back(i);
    }
    const auto before = build(b, outputs, "dce,order,alias");
    const auto after = build(b, outputs, "dce,alias");
    EXPECT_LE(after.peak, before.peak);
    changed += after.nodes != before.nodes ? 1 : 0;
    if (after.nodes != before.nodes) {
      EXPECT_LT(after.peak, before.peak);
    }
    std::vector<size_t> position(nodes);
    ASSERT_EQ(after.nodes.size(), nodes);
    for (size_t i = 0; i < nodes; ++i) position[after.nodes[i]] = i;
    size_t last_fixed = 0;
    for (uint32_t i = 0; i < nodes; ++i) {
      if (b.graph.nodes[i].op->removable) continue;
      EXPECT_GE(position[i], last_fixed);
      last_fixed = position[i];
    }
    for (const graph::Edge& edge : graph::edges(b.graph)) {
      EXPECT_LT(position[edge.from], position[edge.to]) << "round " << round;
    }
  }
  EXPECT_GT(changed, 10U);  // else this has tested nothing
}

}  // namespace
}  // namespace acc
