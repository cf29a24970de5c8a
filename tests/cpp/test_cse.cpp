#include "lazy/passes/cse.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lazy/graph/words.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using Lines = std::vector<std::string>;

// Each call is of an operator of its own address but equal name, as `Op`s are compared by id.
struct Program : testing::GraphBuilder {
  uint32_t made(const std::string& name, std::initializer_list<testing::Vector> reads,
                uint64_t nbytes = 16) {
    const uint32_t result = fresh(nbytes);
    call(name, reads, {{result, static_cast<int64_t>(nbytes / 4)}});
    return result;
  }
  Lines run(std::initializer_list<uint32_t> outputs) const {
    return testing::lines_of(passes::eliminate_common_calls(graph, alive(outputs)));
  }
};

TEST(Cse, TheSecondOfTwoEqualCallsGoes) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t a = p.made("exp", {{x}});
  const uint32_t b = p.made("exp", {{x}});
  const uint32_t sum = p.made("add", {{a}, {b}});
  EXPECT_EQ(p.run({sum}),
            (Lines{"%1:f32[4] = exp(%0:f32[4])", "%3:f32[4] = add(%1:f32[4], %1:f32[4])"}));
}

TEST(Cse, WhatFollowsFromItGoesToo) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t a = p.made("sin", {{p.made("exp", {{x}})}});
  const uint32_t b = p.made("sin", {{p.made("exp", {{x}})}});
  const uint32_t sum = p.made("add", {{a}, {b}});
  EXPECT_EQ(p.run({sum}).size(), 3U);
}

TEST(Cse, OtherOperandsViewsOperatorsAndSettingsAreOtherCalls) {
  Program p;
  const uint32_t x = p.input(), y = p.input();
  const std::initializer_list<testing::Vector> read{{x}};
  p.made("exp", read);
  p.made("exp", {{y}});
  p.made("exp", {{x, 4, 1}});
  p.made("sin", read);
  p.made("exp", read);
  p.graph.nodes.back().ambient = 1;
  EXPECT_EQ(p.run({}).size(), 5U);
}

TEST(Cse, AWriteOfAnOperandBetweenThemKeepsBoth) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t a = p.made("exp", {{x}});
  p.in_place("zero_", {{x, 1, 3}});
  const uint32_t b = p.made("exp", {{x}});
  p.made("add", {{a}, {b}});
  EXPECT_EQ(p.run({}).size(), 4U);
}

TEST(Cse, AWriteThroughAnotherViewOfTheStorageKeepsBoth) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t view = p.input_view(x, 4);
  const uint32_t a = p.made("exp", {{x}});
  p.in_place("zero_", {{view, 1}});
  const uint32_t b = p.made("exp", {{x}});
  p.made("add", {{a}, {b}});
  EXPECT_EQ(p.run({}).size(), 4U);
}

TEST(Cse, AResultThatTheUserSeesHasMemoryOfItsOwn) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t a = p.made("exp", {{x}});
  const uint32_t b = p.made("exp", {{x}});
  EXPECT_EQ(p.run({a, b}).size(), 2U);
  // The first may be seen: it is only read.
  p.made("add", {{a}, {b}});
  EXPECT_EQ(p.run({a}).size(), 2U);
  EXPECT_EQ(p.run({b}).size(), 3U);
}

TEST(Cse, AResultThatIsWrittenLaterHasMemoryOfItsOwn) {
  for (const bool first : {true, false}) {
    Program p;
    const uint32_t x = p.input();
    const uint32_t a = p.made("exp", {{x}});
    const uint32_t b = p.made("exp", {{x}});
    p.in_place("zero_", {{first ? a : b}});
    p.made("add", {{a}, {b}});
    EXPECT_EQ(p.run({}).size(), 4U);
  }
}

TEST(Cse, RandomCallsAndThoseThatMustRunHaveNoEquals) {
  Program p;
  const uint32_t x = p.input();
  for (int i = 0; i < 2; ++i) {
    p.made("noise", {{x}});
    p.last_op().mergeable = false;
    p.made("check", {{x}});
    p.last_op().removable = false;
  }
  EXPECT_EQ(p.run({}).size(), 4U);
}

TEST(Cse, NumbersThatChangeFromRunToRunEqualNothing) {
  Program p;
  const uint32_t x = p.input();
  for (uint32_t i = 0; i < 2; ++i) {
    p.made("scale", {{x}});
    p.last_op().arguments.emplace_back();
    graph::Node& node = p.graph.nodes.back();
    p.graph.words.insert(p.graph.words.begin() + node.outputs,
                         graph::make_tag(graph::Tag::kFloat, 0, graph::kValueFlag));
    ++node.outputs;
    ++node.end;
    node.values = i;
    node.n_values = 1;
  }
  EXPECT_EQ(p.run({}).size(), 2U);
}

TEST(Cse, TwoEqualCastsToNewMemoryAreOne) {
  Program p;
  const uint32_t x = p.input(), a = p.fresh(8), b = p.fresh(8);
  p.copy({a, 4, 0, graph::dtype::kBF16}, {x});
  const uint32_t y = p.made("sin", {{a, 4, 0, graph::dtype::kBF16}});
  p.copy({b, 4, 0, graph::dtype::kBF16}, {x});
  p.made("add", {{y}, {a, 4, 0, graph::dtype::kBF16}, {b, 4, 0, graph::dtype::kBF16}});
  EXPECT_EQ(p.run({}).size(), 3U);
}

TEST(Cse, WhatIsLargeAndDeadIsComputedAgain) {
  // As activation checkpointing has it: the second call is there to save memory.
  for (const uint64_t nbytes : {uint64_t{64} << 10, uint64_t{128} << 10}) {
    Program p;
    const auto n = static_cast<int64_t>(nbytes / 4);
    const uint32_t x = p.input();
    const uint32_t a = p.made("exp", {{x}}, nbytes);
    p.made("sum", {{a, n}});
    p.made("sin", {{x}});
    const uint32_t b = p.made("exp", {{x}}, nbytes);
    p.made("sum", {{b, n}});
    // `sum` is equal too where its operand is.
    EXPECT_EQ(p.run({}).size(), nbytes == uint64_t{64} << 10 ? 3U : 5U);
  }
}

}  // namespace
}  // namespace acc
