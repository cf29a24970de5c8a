// Elementwise values are computed again where that takes them off the peak of memory.
#include "lazy/passes/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cpp/elementwise_builder.h"

namespace acc {
namespace {

using Lines = std::vector<std::string>;
using passes::Cluster;

constexpr int64_t kMany = 1 << 14;  // elements: 64 KiB

struct Program : testing::ElementwiseBuilder {
  uint32_t negative(uint32_t x) { return unary("aten::neg", x, kMany); }
  uint32_t exponential(uint32_t x) { return unary("aten::exp", x, kMany); }
  uint32_t sorted(uint32_t x) { return opaque(x, kMany); }
  uint32_t times(uint32_t x, uint32_t y) { return product(x, y, kMany); }
  // The most memory is needed in the second of these calls.
  uint32_t middle(uint32_t x) { return sorted(sorted(x)); }

  std::optional<graph::Graph> run(std::initializer_list<uint32_t> outputs = {}) const {
    return passes::recompute(graph, passes::fuse(graph), alive(outputs));
  }
  // A value that is worth computing again: from what the step is given and reads at its end.
  uint32_t held(uint32_t given) {
    const uint32_t y = negative(given);
    times(times(middle(y), y), given);
    return y;
  }
  // What is computed again, and for whom.
  Lines added(std::initializer_list<uint32_t> outputs = {}) const {
    Lines lines;
    const auto made = run(outputs);
    if (!made.has_value()) return lines;
    for (size_t i = 0; i < made->nodes.size(); ++i) {
      if (made->nodes[i].again) lines.push_back(graph::print(*made, made->nodes[i]));
      if (made->nodes[i].again && !made->nodes[i + 1].again) {
        lines.push_back(graph::print(*made, made->nodes[i + 1]));
      }
    }
    return lines;
  }
};

TEST(Recompute, AValueThatIsHeldAtThePeak) {
  Program p;
  const uint32_t x = p.sorted(p.input());
  const uint32_t y = p.negative(x);
  const uint32_t z = p.times(p.middle(y), y);
  p.times(z, x);
  EXPECT_EQ(p.added(), (Lines{"%7:f32[16384] = aten::neg(%1:f32[16384])",
                              "%5:f32[16384] = aten::mul.Tensor(%4:f32[16384], %7:f32[16384])"}));
}

TEST(Recompute, WhatWasAddedJoinsItsReaderNotWhatMadeItsOperand) {
  Program p;
  const uint32_t x = p.exponential(p.sorted(p.input()));
  const uint32_t y = p.negative(x);
  const uint32_t z = p.times(p.middle(y), y);
  p.times(z, x);
  const size_t before = passes::fuse(p.graph).size();
  const auto made = p.run();
  ASSERT_TRUE(made.has_value());
  const std::vector<Cluster> clusters = passes::fuse(*made);
  EXPECT_EQ(clusters.size(), before);
  const auto again = std::ranges::find(made->nodes, true, &graph::Node::again);
  const auto index = static_cast<uint32_t>(again - made->nodes.begin());
  const auto cluster = std::ranges::find_if(clusters, [&](const Cluster& each) {
    return std::ranges::find(each.nodes, index) != each.nodes.end();
  });
  EXPECT_EQ(cluster->nodes, (std::vector<uint32_t>{index, index + 1, index + 2}));
}

TEST(Recompute, NothingWhoseOperandWouldHaveToBeHeldInstead) {
  Program p;
  const uint32_t y = p.negative(p.sorted(p.input()));
  p.times(p.middle(y), y);
  EXPECT_EQ(p.added(), Lines());
}

TEST(Recompute, WhatTheStepWasGivenIsHeldUntilItsLastUse) {
  for (const bool read : {false, true}) {
    Program p;
    const uint32_t given = p.input();
    const uint32_t y = p.negative(given);
    const uint32_t z = p.times(p.middle(y), y);
    if (read) p.times(z, given);
    EXPECT_EQ(p.added().empty(), !read);
  }
}

TEST(Recompute, NothingWhoseOperandIsOverwrittenBefore) {
  for (const bool overwritten : {false, true}) {
    Program p;
    const uint32_t given = p.input();
    const uint32_t y = p.negative(given);
    const uint32_t z = p.middle(y);
    if (overwritten) p.in_place("aten::sort_", {{given, kMany}});
    p.times(p.times(z, y), given);
    EXPECT_EQ(p.added().empty(), overwritten);
  }
}

TEST(Recompute, WhatIsOverwrittenAfterTheReaderMayBeReadAgain) {
  Program p;
  const uint32_t given = p.input();
  p.held(given);
  p.in_place("aten::sort_", {{given, kMany}});
  EXPECT_EQ(p.added().size(), 2U);
}

TEST(Recompute, WithWhatItNeedsItself) {
  Program p;
  const uint32_t given = p.input();
  const uint32_t y = p.negative(given);
  const uint32_t z = p.times(y, given);
  p.times(p.times(p.middle(z), z), given);
  EXPECT_EQ(p.added(), (Lines{"%7:f32[16384] = aten::neg(%0:f32[16384])",
                              "%8:f32[16384] = aten::mul.Tensor(%7:f32[16384], %0:f32[16384])",
                              "%5:f32[16384] = aten::mul.Tensor(%4:f32[16384], %8:f32[16384])"}));
}

TEST(Recompute, SeveralValuesShareWhatTheyNeed) {
  Program p;
  const uint32_t given = p.input();
  const uint32_t y = p.negative(given);
  const uint32_t z = p.times(y, given);
  const uint32_t w = p.times(p.middle(p.times(y, z)), z);
  p.times(p.times(w, y), given);
  const auto made = p.run();
  ASSERT_TRUE(made.has_value());
  EXPECT_EQ(std::ranges::count(made->nodes, true, &graph::Node::again), 2);
}

TEST(Recompute, OneFunctionAtMost) {
  for (const bool two : {false, true}) {
    Program p;
    const uint32_t given = p.input();
    uint32_t y = p.exponential(given);
    if (two) y = p.exponential(y);
    p.times(p.times(p.middle(y), y), given);
    EXPECT_EQ(p.added().empty(), two);
  }
}

TEST(Recompute, ChainsHaveAnEnd) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr int kLong = 1'000;
#else
  constexpr int kLong = 100'000;
#endif
  for (const int length : {8, 9, kLong}) {
    Program p;
    const uint32_t given = p.input();
    uint32_t y = given;
    for (int i = 0; i < length; ++i) y = p.negative(y);
    p.times(p.times(p.middle(y), y), given);
    EXPECT_EQ(p.added().empty(), length >= 9);
  }
}

TEST(Recompute, NothingThatIsHeldAnyway) {
  Program p;
  const uint32_t y = p.held(p.input());
  EXPECT_EQ(p.added().size(), 2U);
  EXPECT_EQ(p.added({y}), Lines());
}

TEST(Recompute, NothingForOtherCallsThanKernels) {
  Program p;
  const uint32_t y = p.held(p.input());
  EXPECT_EQ(p.added().size(), 2U);
  p.sorted(y);
  EXPECT_EQ(p.added(), Lines());
}

TEST(Recompute, NothingForTwoKernels) {
  for (const bool two : {false, true}) {
    Program p;
    const uint32_t given = p.input();
    const uint32_t y = p.negative(given);
    const uint32_t z = p.sorted(p.times(p.times(p.middle(y), y), given));
    p.times(z, two ? y : given);
    EXPECT_EQ(p.added().empty(), two);
  }
}

TEST(Recompute, NothingSmall) {
  for (const int64_t n : {kMany - 1, kMany}) {
    Program p;
    const uint32_t given = p.input();
    const uint32_t y = p.unary("aten::neg", given, n);
    p.product(p.product(p.opaque(p.opaque(y, n), n), y, n), given, n);
    EXPECT_EQ(p.added().empty(), n < kMany);
  }
}

TEST(Recompute, NothingThatIsNotThereAtThePeak) {
  Program p;
  p.held(p.input());
  EXPECT_EQ(p.added().size(), 2U);
  // Now more is needed than then.
  const uint32_t x = p.input();
  const uint32_t a = p.sorted(x), b = p.sorted(x), c = p.sorted(x), d = p.sorted(x);
  p.call("aten::sort", {{a, kMany}, {b, kMany}, {c, kMany}, {d, kMany}}, {{p.fresh(), 4}});
  EXPECT_EQ(p.added(), Lines());
}

}  // namespace
}  // namespace acc
