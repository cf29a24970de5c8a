// Products of half types are computed in float32 on hosts, and rounded behind.
#include <gtest/gtest.h>

#include "lazy/passes/widen.h"
#include "tests/cpp/product_builder.h"

namespace acc {
namespace {

using Lines = std::vector<std::string>;
using graph::dtype::kF16;
using testing::Matrix;

struct Program : testing::ProductBuilder {
  graph::Op copy_op;

  Program() {
    copy_op.name = "copy_";
    copy_op.arguments = {
        {.name = "self", .writes = true}, {.name = "src"}, {.name = "non_blocking"}};
    copy_op.returns = {{.alias = 0}};
    mm.copy = addmm.copy = &copy_op;
    mm.multiplies_bf16 = true;
  }
  Matrix left{input(), 2, 3, {3, 1}, kF16};
  Matrix right{input(), 3, 4, {4, 1}, kF16};

  Lines lines() const { return testing::lines_of(passes::widen_products(graph)); }
};

TEST(Widen, OperandsAreConvertedAndTheResultIsRounded) {
  Program p;
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines(), (Lines{"copy_(%3:f32[2,3], %0:f16[2,3], False)",
                              "copy_(%4:f32[3,4], %1:f16[3,4], False)",
                              "%5:f32[2,4] = mm(%3:f32[2,3], %4:f32[3,4])",
                              "copy_(%2:f16[2,4], %5:f32[2,4], False)"}));
}

TEST(Widen, AnOperandIsConvertedOnceAlsoWhereItIsTransposed) {
  Program p;
  p.multiply(p.left, p.right);
  const Matrix transposed{p.right.buffer, 4, 3, {1, 4}, kF16};
  p.multiply({p.input(), 2, 4, {4, 1}, kF16}, transposed);
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 7U);
  EXPECT_EQ(lines[5], "%9:f32[2,3] = mm(%8:f32[2,4], %6:f32[4,3]/[1,4])");
}

TEST(Widen, AfterAWriteItIsConvertedAgain) {
  Program p;
  p.multiply(p.left, p.right);
  p.in_place("zero_", {{p.right.buffer, 1, 3, kF16}});
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines().size(), 4U + 1 + 3);
}

TEST(Widen, AWriteThroughAnotherViewOfTheStorageCounts) {
  Program p;
  const uint32_t view = p.input_view(p.right.buffer, 0);
  p.multiply(p.left, p.right);
  p.in_place("zero_", {{view, 1, 3, kF16}});
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines().size(), 4U + 1 + 3);
}

TEST(Widen, WhatIsWrittenInPlaceIsConvertedBackAndForth) {
  Program p;
  p.addmm.arguments[0].writes = true;
  p.multiply(p.left, p.right, p.input());
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 6U);
  EXPECT_EQ(lines[4].substr(0, 5), "copy_");
  EXPECT_EQ(lines[5].substr(0, 5), "copy_");
}

TEST(Widen, ABiasIsConvertedToo) {
  Program p;
  p.multiply(p.left, p.right, p.input());
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 5U);
  EXPECT_EQ(lines[0], "copy_(%4:f32[4], %2:f16[4], False)");
}

TEST(Widen, GapsBetweenRowsAreLeftOut) {
  Program p;
  p.left.strides = {7, 1};
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines()[0], "copy_(%3:f32[2,3], %0:f16[2,3]/[7,1], False)");
}

TEST(Widen, TheOtherHalfTypeOnlyWhereTheProcessorHasNoInstructionsForIt) {
  Program p;
  p.left.dtype = p.right.dtype = graph::dtype::kBF16;
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines().size(), 1U);
  p.mm.multiplies_bf16 = false;
  EXPECT_EQ(p.lines().size(), 4U);
}

TEST(Widen, OtherProductsStay) {
  Program p;
  p.left.dtype = p.right.dtype = graph::dtype::kF32;
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines(), testing::lines_of(p.graph));
  p.left.dtype = p.right.dtype = kF16;
  p.mm.copy = nullptr;
  p.multiply(p.left, p.right);
  EXPECT_EQ(p.lines(), testing::lines_of(p.graph));
}

}  // namespace
}  // namespace acc
