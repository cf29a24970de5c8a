#include "lazy/passes/copies.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lazy/graph/words.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

namespace dtype = graph::dtype;
using Lines = std::vector<std::string>;
using testing::Vector;

struct Program : testing::GraphBuilder {
  uint32_t copied(Vector from, uint8_t type = dtype::kF32) {
    const uint32_t made = fresh(static_cast<uint64_t>(from.elements) * graph::element_bytes(type));
    copy({made, from.elements, 0, type}, from);
    return made;
  }
  uint32_t read(Vector from) {
    const uint32_t made = fresh();
    call("exp", {from}, {{made}});
    return made;
  }
  Lines run(std::initializer_list<uint32_t> outputs) const {
    return testing::lines_of(passes::eliminate_copies(graph, alive(outputs)));
  }
};

TEST(Copies, WhatReadsTheCopyReadsTheSource) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t y = p.read({p.copied({x})});
  EXPECT_EQ(p.run({y}), (Lines{"%2:f32[4] = exp(%0:f32[4])"}));
}

TEST(Copies, ACopyOfACopyToo) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t y = p.read({p.copied({p.copied({x})})});
  EXPECT_EQ(p.run({y}), (Lines{"%3:f32[4] = exp(%0:f32[4])"}));
}

TEST(Copies, ViewsOfTheCopyAreViewsOfTheSource) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t copy = p.copied({x, 4, 5});
  const uint32_t y = p.read({copy, 2, 1});
  const graph::Graph out = passes::eliminate_copies(p.graph, p.alive({y}));
  ASSERT_EQ(out.nodes.size(), 1U);
  const graph::TensorWords read = graph::read_tensor(out.arguments(out.nodes[0]).data());
  EXPECT_EQ(read.buffer, x);
  EXPECT_EQ(read.offset, 6);
}

TEST(Copies, AViewAsAWiderTypeWantsItsAlignment) {
  for (const int64_t offset : {1, 2}) {
    Program p;
    const uint32_t x = p.input();
    const uint32_t copy = p.copied({x, 4, offset});
    const uint32_t y = p.read({copy, 2, 0, dtype::kF64});
    EXPECT_EQ(p.run({y}).size(), offset == 2 ? 1U : 2U);
  }
}

TEST(Copies, ACopyThatTheUserSeesStays) {
  Program p;
  const uint32_t copy = p.copied({p.input()});
  p.read({copy});
  EXPECT_EQ(p.run({copy}).size(), 2U);
}

TEST(Copies, AWriteOfTheSourceWhileTheCopyIsUsedKeepsIt) {
  for (const int when : {0, 1, 2}) {
    Program p;
    const uint32_t x = p.input();
    if (when == 0) p.in_place("zero_", {{x}});
    const uint32_t copy = p.copied({x});
    if (when == 1) p.in_place("zero_", {{x}});
    p.read({copy});
    if (when == 2) p.in_place("zero_", {{x}});
    EXPECT_EQ(p.run({}).size(), when == 1 ? 3U : 2U) << when;
  }
}

TEST(Copies, AWriteThatReadsTheCopyKeepsIt) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t copy = p.copied({x});
  p.in_place("add_", {{x}}, {{copy}});
  EXPECT_EQ(p.run({}).size(), 2U);
}

TEST(Copies, ACopyThatIsWrittenStays) {
  Program p;
  const uint32_t copy = p.copied({p.input()});
  p.in_place("zero_", {{copy, 1}});
  p.read({copy});
  EXPECT_EQ(p.run({}).size(), 3U);
}

TEST(Copies, ACopyIntoPartOfABufferStays) {
  Program p;
  const uint32_t target = p.fresh(32);
  p.copy({target}, {p.input()});
  p.read({target});
  EXPECT_EQ(p.run({}).size(), 2U);
}

TEST(Copies, ACopyToAnotherLayoutStays) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t copy = p.copied({x});
  const graph::Node& node = p.graph.nodes.back();
  p.graph.words[node.outputs - 1] = 2;  // every second element of x
  p.read({copy});
  EXPECT_EQ(p.run({}).size(), 2U);
}

TEST(Copies, ACastStays) {
  Program p;
  const uint32_t half = p.copied({p.input()}, dtype::kBF16);
  p.read({half, 4, 0, dtype::kBF16});
  EXPECT_EQ(p.run({}).size(), 2U);
}

TEST(Copies, ACastToAWiderTypeAndBackIsACopy) {
  for (const uint8_t wide : {dtype::kF32, dtype::kF64}) {
    Program p;
    const uint32_t x = p.input();
    const uint32_t up = p.copied({x, 4, 0, dtype::kBF16}, wide);
    const uint32_t back = p.copied({up, 4, 0, wide}, dtype::kBF16);
    const uint32_t y = p.read({back, 4, 0, dtype::kBF16});
    EXPECT_EQ(p.run({y}), (Lines{"%3:f32[4] = exp(%0:bf16[4])"}));
    // Whoever reads the wide one as well still can.
    p.read({up, 4, 0, wide});
    EXPECT_EQ(p.run({y}).size(), 3U);
    // A copy that is seen is made from what it is a copy of.
    EXPECT_EQ(p.run({back})[1], "aten::copy_(%2:bf16[4], %0:bf16[4])");
  }
}

TEST(Copies, ACastToANarrowerTypeAndBackStays) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t down = p.copied({x}, dtype::kF16);
  const uint32_t back = p.copied({down, 4, 0, dtype::kF16});
  p.read({back});
  EXPECT_EQ(p.run({}).size(), 3U);
  // Neither half type holds all of the other.
  Program q;
  const uint32_t other = q.copied({q.input(), 4, 0, dtype::kF16}, dtype::kBF16);
  q.read({q.copied({other, 4, 0, dtype::kBF16}, dtype::kF16), 4, 0, dtype::kF16});
  EXPECT_EQ(q.run({}).size(), 3U);
}

TEST(Copies, AWriteOfWhatWasCastKeepsTheWayBack) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t up = p.copied({x, 4, 0, dtype::kF16});
  p.in_place("zero_", {{x, 4, 0, dtype::kF16}});
  p.read({p.copied({up}, dtype::kF16), 4, 0, dtype::kF16});
  EXPECT_EQ(p.run({}).size(), 4U);
}

TEST(Copies, ALargeSourceIsNotKeptForASmallCopy) {
  for (const uint64_t bytes : {16, 4096}) {
    Program p;
    const uint32_t x = p.fresh(bytes);
    p.call("make", {}, {{x, static_cast<int64_t>(bytes / 4)}});
    const uint32_t copy = p.copied({x});
    p.read({copy});
    EXPECT_EQ(p.run({}).size(), bytes == 16 ? 2U : 3U);
    // Whoever reads the source later keeps it anyway.
    p.read({x});
    EXPECT_EQ(p.run({}).size(), 3U);
  }
}

}  // namespace
}  // namespace acc
