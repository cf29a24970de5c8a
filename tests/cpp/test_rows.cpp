// Products with a shared matrix become one product of all their rows.
#include <gtest/gtest.h>

#include "lazy/graph/edges.h"
#include "lazy/passes/rows.h"
#include "tests/cpp/product_builder.h"

namespace acc {
namespace {

using Lines = std::vector<std::string>;
using graph::Graph;

constexpr int64_t kRows = 2;
constexpr int64_t kTerms = 4;
constexpr int64_t kColumns = 16;

// Matrices of 2 x 4 times one of 4 x 16.
struct Program : testing::ProductBuilder {
  graph::Op cat;

  Program() {
    cat.name = "cat";
    cat.returns = {{}};
    cat.arguments = {{.name = "tensors", .list = graph::ListOf::kTensor}, {.name = "dim"}};
    mm.cat = addmm.cat = &cat;
  }

  // left @ shared, of `rows` rows.
  uint32_t product(uint32_t left, uint32_t shared, int64_t rows = kRows) {
    return multiply({left, rows, kTerms}, {shared, kTerms, kColumns});
  }
  // bias + left @ shared
  uint32_t product_plus(uint32_t bias, uint32_t left, uint32_t shared, int64_t alpha = 1) {
    return multiply({left, kRows, kTerms}, {shared, kTerms, kColumns}, bias, alpha);
  }
  uint32_t read(uint32_t from) {
    const uint32_t made = fresh();
    call("exp", {{from}}, {{made}});
    return made;
  }
  Graph run(std::initializer_list<uint32_t> outputs = {}) const {
    return passes::join_rows(graph, alive(outputs));
  }
  Lines lines(std::initializer_list<uint32_t> outputs = {}) const {
    return testing::lines_of(run(outputs));
  }
  bool unchanged(std::initializer_list<uint32_t> outputs = {}) const {
    return lines(outputs) == testing::lines_of(graph);
  }
};

TEST(Rows, FourProductsBecomeOneBeforeTheFirstReader) {
  Program p;
  const uint32_t shared = p.input();
  std::vector<uint32_t> made;
  for (int i = 0; i < 4; ++i) made.push_back(p.product(p.input(), shared));
  p.call("last", {{made[3]}}, {{p.fresh()}});
  p.call("others", {{made[0], 4, 1}, {made[1]}, {made[2]}}, {{p.fresh()}});
  EXPECT_EQ(
      p.lines(),
      (Lines{"%11:f32[8,4] = cat([%1:f32[2,4], %3:f32[2,4], %5:f32[2,4], %7:f32[2,4]], 0)",
             "%12:f32[8,16] = mm(%11:f32[8,4], %0:f32[4,16])", "%9:f32[4] = last(%12:f32[4]+96)",
             "%10:f32[4] = others(%12:f32[4]+1, %12:f32[4]+32, %12:f32[4]+64)"}));
}

TEST(Rows, ABiasIsAddedToAllRows) {
  Program p;
  const uint32_t shared = p.input();
  const uint32_t bias = p.input();
  for (int i = 0; i < 4; ++i) p.read(p.product_plus(bias, p.input(), shared));
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 6U);
  EXPECT_NE(lines[1].find("[8,16] = addmm(%1:f32[16], "), std::string::npos) << lines[1];
}

TEST(Rows, ThreeAreNotWorthIt) {
  Program p;
  const uint32_t shared = p.input();
  for (int i = 0; i < 3; ++i) p.read(p.product(p.input(), shared));
  EXPECT_TRUE(p.unchanged());
}

TEST(Rows, NeitherAreManyRows) {
  Program p;
  const uint32_t shared = p.input();
  for (int i = 0; i < 4; ++i) p.read(p.product(p.input(), shared, kColumns / 2));
  EXPECT_TRUE(p.unchanged());
}

TEST(Rows, EachSharedMatrixHasItsOwn) {
  Program p;
  const uint32_t a = p.input();
  const uint32_t b = p.input();
  for (int i = 0; i < 4; ++i) {
    p.product(p.input(), a);
    p.product(p.input(), b);
  }
  for (const uint32_t made : {3U, 5U, 7U, 9U, 11U, 13U, 15U, 17U}) p.read(made);
  EXPECT_EQ(p.run().nodes.size(), 2U * 2 + 8);
}

TEST(Rows, ProductsThatDifferInAnythingElseStay) {
  for (int what = 0; what < 5; ++what) {
    Program p;
    const uint32_t shared = p.input();
    const uint32_t bias = p.input();
    const uint32_t other = p.input();
    for (int i = 0; i < 6; ++i) {
      const bool odd = i % 2 != 0;
      const uint32_t left = p.input();
      const uint32_t made = what == 0          ? p.product_plus(odd ? other : bias, left, shared)
                            : what == 1        ? p.product_plus(bias, left, shared, odd ? 2 : 1)
                            : what == 2        ? p.product(left, odd ? other : shared)
                            : what == 3 && odd ? p.product(left, shared)
                                               : p.product_plus(bias, left, shared);
      if (what == 4 && odd) p.graph.nodes.back().ambient = 1;
      p.read(made);
    }
    EXPECT_TRUE(p.unchanged()) << what;
  }
}

TEST(Rows, AGroupHasAnEnd) {
  Program p;
  const uint32_t shared = p.input();
  std::vector<uint32_t> made;
  for (int i = 0; i < 1100; ++i) made.push_back(p.product(p.input(), shared));
  for (const uint32_t each : made) p.read(each);
  EXPECT_EQ(p.run().nodes.size(), 1100U + 3 * 2);
}

// x @ shared and state @ shared in turns: what cannot join does not end the group that could grow.
TEST(Rows, ARecurrenceWithTheSameMatrixIsPassedOver) {
  Program p;
  const uint32_t shared = p.input();
  uint32_t state = p.input();
  for (int i = 0; i < 5; ++i) {
    const uint32_t input = p.product(p.input(), shared);
    const uint32_t next = p.product(state, shared);
    state = p.fresh();
    p.call("add", {{input}, {next}}, {{state}});
  }
  // the first state is there from the start
  EXPECT_EQ(p.run().nodes.size(), 2U + 4 + 5);
}

// A recurrence: each left operand is made of the last result.
TEST(Rows, WhatDependsOnEachOtherStays) {
  Program p;
  const uint32_t shared = p.input();
  uint32_t state = p.input();
  for (int i = 0; i < 6; ++i) state = p.read(p.product(state, shared));
  EXPECT_TRUE(p.unchanged());
}

TEST(Rows, AProductOfAProductStays) {
  Program p;
  const uint32_t shared = p.input();
  const uint32_t first = p.product(p.input(), shared);
  for (int i = 0; i < 4; ++i) p.read(p.product(first, shared));
  EXPECT_TRUE(p.unchanged());
}

TEST(Rows, WhatTheUserSeesStays) {
  Program p;
  const uint32_t shared = p.input();
  std::vector<uint32_t> made;
  for (int i = 0; i < 5; ++i) {
    made.push_back(p.product(p.input(), shared));
    p.read(made.back());
  }
  EXPECT_EQ(p.run({made[2]}).nodes.size(), 2U + 1 + 5);
  EXPECT_TRUE(p.unchanged({made[1], made[2]}));
}

TEST(Rows, TheSharedMatrixIsTheSameForAll) {
  Program p;
  const uint32_t shared = p.input();
  for (int i = 0; i < 6; ++i) {
    if (i == 3) p.in_place("add_", {{shared}});
    p.read(p.product(p.input(), shared));
  }
  EXPECT_TRUE(p.unchanged());
}

TEST(Rows, AnOperandThatIsWrittenBeforeTheReaderStays) {
  Program p;
  const uint32_t shared = p.input();
  std::vector<uint32_t> made;
  const uint32_t changed = p.input();
  for (int i = 0; i < 4; ++i) made.push_back(p.product(i == 0 ? changed : p.input(), shared));
  p.in_place("add_", {{changed}});
  for (const uint32_t each : made) p.read(each);
  EXPECT_TRUE(p.unchanged());
}

// The rows of a joint result depend on their own writes only.
TEST(Rows, AResultMayBeWrittenInPlace) {
  Program p;
  const uint32_t shared = p.input();
  std::vector<uint32_t> made;
  for (int i = 0; i < 4; ++i) made.push_back(p.product(p.input(), shared));
  p.in_place("add_", {{made[1], kRows * kColumns}});
  p.read(made[1]);
  p.read(made[2]);
  p.call("others", {{made[0]}, {made[3]}}, {{p.fresh()}});
  const Graph joined = p.run();
  ASSERT_EQ(joined.nodes.size(), 6U);
  const auto before = graph::predecessors(joined);
  EXPECT_EQ(before[3], (std::vector<uint32_t>{2}));
  EXPECT_EQ(before[4], (std::vector<uint32_t>{1}));
}

}  // namespace
}  // namespace acc
