// Large products are made by the operator that is faster, and no others.
#include <gtest/gtest.h>

#include "lazy/passes/products.h"
#include "tests/cpp/product_builder.h"

namespace acc {
namespace {

using Lines = std::vector<std::string>;
using testing::Matrix;

constexpr int64_t kRows = 1024;
constexpr int64_t kTerms = 256;
constexpr int64_t kColumns = 128;

struct Program : testing::ProductBuilder {
  graph::Op linear;

  Program() {
    linear.name = "linear";
    linear.arguments = {{.name = "input"}, {.name = "weight"}, {.name = "bias"}};
    linear.returns = {{}};
    mm.linear = addmm.linear = &linear;
  }
  Matrix left{input(), kRows, kTerms};
  Matrix right{input(), kTerms, kColumns};

  Lines lines() const { return testing::lines_of(passes::choose_products(graph)); }
  bool unchanged() const { return lines() == testing::lines_of(graph); }
};

TEST(Products, TheRightMatrixIsPassedTransposed) {
  Program p;
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines(),
            (Lines{"%2:f32[1024,128] = linear(%0:f32[1024,256], %1:f32[128,256]/[1,128], None)"}));
}

TEST(Products, AMatrixThatIsTransposedAlreadyIsNot) {
  Program p;
  p.right.strides = {1, kTerms};
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines(),
            (Lines{"%2:f32[1024,128] = linear(%0:f32[1024,256], %1:f32[128,256], None)"}));
}

TEST(Products, ABiasGoesAlong) {
  Program p;
  p.multiply(p.left, p.right, p.input());
  EXPECT_EQ(p.lines(), (Lines{"%3:f32[1024,128] = linear(%0:f32[1024,256], "
                              "%1:f32[128,256]/[1,128], %2:f32[128])"}));
}

TEST(Products, OnTheRightRowsMayLieApart) {
  Program p;
  p.right.strides = {3 * kColumns, 1};
  p.multiply(p.left, p.right);
  EXPECT_FALSE(p.unchanged());
}

TEST(Products, OnTheLeftTheyWouldBeCopied) {
  Program p;
  p.left.strides = {3 * kTerms, 1};
  p.multiply(p.left, p.right);
  EXPECT_TRUE(p.unchanged());
}

TEST(Products, TheSettingsOfTheCallStay) {
  Program p;
  p.multiply(p.left, p.right);
  p.graph.nodes[0].ambient = 5;
  EXPECT_EQ(passes::choose_products(p.graph).nodes[0].ambient, 5U);
}

TEST(Products, SmallOnesStay) {
  Program p;
  p.left.rows = kRows - 1;
  p.multiply(p.left, p.right);
  EXPECT_TRUE(p.unchanged());
}

TEST(Products, FewRowsStay) {
  for (const int64_t rows : {63, 64}) {
    Program p;
    p.left = {p.left.buffer, rows, 1024};
    p.right = {p.right.buffer, 1024, 1024};
    p.multiply(p.left, p.right);
    EXPECT_EQ(p.unchanged(), rows == 63);
  }
}

TEST(Products, TransposedLeftMatricesStay) {
  Program p;
  p.left.strides = {1, kRows};
  p.multiply(p.left, p.right);
  EXPECT_TRUE(p.unchanged());
}

TEST(Products, RowsThatOverlapStay) {
  for (const bool on_the_left : {false, true}) {
    for (const int64_t apart : {0, 1, 2}) {
      Program p;
      (on_the_left ? p.left : p.right).strides = {apart, 1};
      p.multiply(p.left, p.right);
      EXPECT_TRUE(p.unchanged()) << on_the_left << apart;
    }
  }
}

TEST(Products, OtherTypesStay) {
  Program p;
  p.left.dtype = p.right.dtype = graph::dtype::kF64;
  p.multiply(p.left, p.right);
  EXPECT_TRUE(p.unchanged());
}

TEST(Products, FactorsStay) {
  Program p;
  p.multiply(p.left, p.right, p.input(), 2);
  EXPECT_TRUE(p.unchanged());
}

TEST(Products, WithoutABetterOperatorAllStay) {
  Program p;
  p.mm.linear = nullptr;
  p.multiply(p.left, p.right);
  EXPECT_TRUE(p.unchanged());
}

// Results in memory that others see, too.
TEST(Products, ResultsThatAreNotAWholeBufferStay) {
  Program p;
  const uint32_t made = p.multiply(p.left, p.right);
  p.graph.buffers[made].nbytes += 4;
  EXPECT_TRUE(p.unchanged());
}

}  // namespace
}  // namespace acc
