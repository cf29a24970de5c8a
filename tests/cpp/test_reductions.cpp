// Kernels with reductions: in which pass what is computed, and what the rendered text gives for
// every length, along rows and along columns.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernels/codegen/phases.h"
#include "lazy/graph/dtype.h"
#include "tests/cpp/kernel_builder.h"

namespace acc {
namespace {

using codegen::Instruction;
using codegen::KernelSpec;
using codegen::Phases;
using codegen::Walk;
using graph::Fn;
using testing::apply;
using testing::compiled;
using testing::constant;
using testing::operand;
using testing::position;
using testing::reduction;
using Indices = std::vector<uint32_t>;
namespace dtype = graph::dtype;

TEST(Phases, AReductionIsThereFromTheNextPhaseOn) {
  const Phases phases = codegen::find_phases(testing::softmax(false));
  ASSERT_EQ(phases.phases.size(), 3U);
  EXPECT_EQ(phases.phases[0].instructions, (Indices{0}));
  EXPECT_EQ(phases.phases[0].reductions, (Indices{1}));
  EXPECT_EQ(phases.phases[0].after, (Indices{1}));
  EXPECT_EQ(phases.phases[1].instructions, (Indices{0, 2, 3}));
  EXPECT_EQ(phases.phases[1].reductions, (Indices{4}));
  EXPECT_EQ(phases.phases[2].instructions, (Indices{0, 2, 3, 5}));
  ASSERT_EQ(phases.phases[2].stores.size(), 1U);
  ASSERT_EQ(phases.kept_stores.size(), 1U);
  EXPECT_EQ(phases.kept_stores[0].operand, 2U);
}

TEST(Phases, AFunctionThatIsNeededAgainWaitsInAResult) {
  KernelSpec kernel = testing::softmax(false);
  const Phases phases = codegen::find_phases(kernel, codegen::Again::kLoaded);
  ASSERT_EQ(phases.phases.size(), 3U);
  ASSERT_EQ(phases.phases[1].stores.size(), 1U);
  EXPECT_EQ(phases.phases[1].stores[0].operand, 1U);
  EXPECT_EQ(phases.phases[1].stores[0].value, 3U);
  ASSERT_EQ(phases.phases[2].loads.size(), 1U);
  EXPECT_EQ(phases.phases[2].loads[0].value, 3U);
  EXPECT_EQ(phases.phases[2].instructions, (Indices{5}));

  // Not in memory that is read, of another type, or with gaps.
  KernelSpec in_place = kernel;
  in_place.stores[0].operand = 0;
  KernelSpec half = kernel;
  half.operands[1].dtype = dtype::kF16;
  KernelSpec strided = kernel;
  strided.operands[1].walk = Walk::kStrided;
  for (const KernelSpec& each : {in_place, half, strided}) {
    const Phases plain = codegen::find_phases(each, codegen::Again::kLoaded);
    EXPECT_TRUE(plain.phases[1].stores.empty());
    EXPECT_EQ(plain.phases[2].instructions, (Indices{0, 2, 3, 5}));
  }
}

// y = x + 1, then z = y - sum(y)
KernelSpec centred(bool in_place) {
  KernelSpec kernel;
  kernel.loops = 2;
  kernel.reduced = 1;
  kernel.operands = {{dtype::kF32, Walk::kContiguous, in_place, false},
                     {dtype::kF32, Walk::kContiguous, true, false},
                     {dtype::kF32, Walk::kContiguous, true, false}};
  Instruction one;
  one.dtype = dtype::kF32;
  one.constant = 1;
  kernel.instructions = {operand(0), one, apply(Fn::kAdd, dtype::kF32, 0, 1),
                         apply(Fn::kSum, dtype::kF32, 2), apply(Fn::kSub, dtype::kF32, 2, 3)};
  kernel.stores = {{in_place ? 0U : 1U, 2}, {2, 4}};
  return kernel;
}

TEST(Phases, WhatWasStoredIsLoadedAgain) {
  const Phases phases = codegen::find_phases(centred(false));
  ASSERT_EQ(phases.phases.size(), 2U);
  EXPECT_EQ(phases.phases[0].instructions, (Indices{0, 2}));
  ASSERT_EQ(phases.phases[0].stores.size(), 1U);
  ASSERT_EQ(phases.phases[1].loads.size(), 1U);
  EXPECT_EQ(phases.phases[1].loads[0].operand, 1U);
  EXPECT_EQ(phases.phases[1].instructions, (Indices{4}));
  EXPECT_EQ(phases.constants, (Indices{1}));
}

TEST(Phases, MemoryThatIsReadIsWrittenInTheLastPhase) {
  const Phases phases = codegen::find_phases(centred(true));
  ASSERT_EQ(phases.phases.size(), 2U);
  EXPECT_TRUE(phases.phases[0].stores.empty());
  EXPECT_EQ(phases.phases[1].stores.size(), 2U);
  EXPECT_TRUE(phases.phases[1].loads.empty());
  EXPECT_EQ(phases.phases[1].instructions, (Indices{0, 2, 4}));
}

TEST(Phases, WithoutFullResultsTheLastPhaseIsTheLastReduction) {
  KernelSpec kernel = testing::softmax(false);
  kernel.stores = {{2, 4}};
  EXPECT_EQ(codegen::find_phases(kernel).phases.size(), 2U);
}

class Kernel : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(RowsAndColumns, Kernel, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Columns" : "Rows"; });

// Softmax over `reduced` elements of each of `kept`, in pieces, as threads would run it.
void expect_softmax(bool columns, int64_t kept, int64_t reduced, int64_t piece) {
  constexpr float kUntouched = -77;
  std::mt19937 random(static_cast<unsigned>(kept * 1000 + reduced));
  std::normal_distribution<float> normal(0, 3);
  const int64_t n = kept * reduced;
  std::vector<float> x(n), out(n + 64, kUntouched), largest(kept + 64, kUntouched);
  for (float& value : x) value = normal(random);
  // Row by row, or with the reduced loop outside in memory.
  const std::vector<int64_t> geometry =
      columns ? std::vector<int64_t>{reduced, kept, kept, 1, kept, 1, 0, 1}
              : std::vector<int64_t>{kept, reduced, reduced, 1, reduced, 1, 1, 0};
  const auto function = compiled(testing::softmax(columns));
  ASSERT_NE(function, nullptr);
  char* const pointers[] = {reinterpret_cast<char*>(x.data()), reinterpret_cast<char*>(out.data()),
                            reinterpret_cast<char*>(largest.data())};
  for (int64_t begin = 0; begin < kept; begin += piece) {
    function(pointers, geometry.data(), nullptr, begin, std::min(kept, begin + piece));
  }
  for (int64_t i = 0; i < kept; ++i) {
    const auto at = [&](int64_t j) { return columns ? j * kept + i : i * reduced + j; };
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < reduced; ++j) most = std::max(most, x[at(j)]);
    double sum = 0;
    for (int64_t j = 0; j < reduced; ++j) sum += std::exp(double{x[at(j)]} - most);
    ASSERT_EQ(largest[i], most);
    for (int64_t j = 0; j < reduced; ++j) {
      const double exact = std::exp(double{x[at(j)]} - most) / sum;
      ASSERT_NEAR(out[at(j)], exact, 1e-6 * exact + 1e-12) << kept << " x " << reduced;
    }
  }
  for (int64_t i = n; i < n + 64; ++i) ASSERT_EQ(out[i], kUntouched);
  for (int64_t i = kept; i < kept + 64; ++i) ASSERT_EQ(largest[i], kUntouched);
}

TEST_P(Kernel, EveryLength) {
  for (int64_t n = 1; n < 70; ++n) {
    expect_softmax(GetParam(), 3, n, 1);
    expect_softmax(GetParam(), n, 3, 64);
  }
  expect_softmax(GetParam(), 1, 5000, 1);
  expect_softmax(GetParam(), 1500, 9, 192);
  expect_softmax(GetParam(), 130, 700, 64);
}

TEST_P(Kernel, PositionsCountAlongReducedAndKeptLoops) {
  // out[kept] = 1000 * kept + sum(x * position in the reduced loop)
  KernelSpec kernel = reduction(Fn::kSum, GetParam());
  kernel.positions = {{GetParam() ? Walk::kBroadcast : Walk::kContiguous, false},
                      {GetParam() ? Walk::kContiguous : Walk::kBroadcast, true}};
  kernel.instructions = {operand(0),
                         position(0),
                         apply(Fn::kMul, dtype::kF32, 0, 1),
                         apply(Fn::kSum, dtype::kF32, 2),
                         position(1),
                         constant(1000),
                         apply(Fn::kMul, dtype::kF32, 4, 5),
                         apply(Fn::kAdd, dtype::kF32, 3, 6)};
  kernel.stores = {{1, 7}};
  const auto function = compiled(kernel);
  ASSERT_NE(function, nullptr);
  for (int64_t n = 1; n < 70; n += 3) {
    for (const int64_t kept : {int64_t{3}, n}) {
      std::vector<float> x(kept * n), out(kept + 8, -1);
      for (int64_t i = 0; i < kept * n; ++i) x[i] = static_cast<float>(i % 5);
      const std::vector<int64_t> geometry =
          GetParam() ? std::vector<int64_t>{n, kept, kept, 1, 0, 1, 1, 0, 0, 1}
                     : std::vector<int64_t>{kept, n, n, 1, 1, 0, 0, 1, 1, 0};
      char* const pointers[] = {reinterpret_cast<char*>(x.data()),
                                reinterpret_cast<char*>(out.data())};
      const int64_t cut = kept / 2;
      if (cut > 0) function(pointers, geometry.data(), nullptr, 0, cut);
      function(pointers, geometry.data(), nullptr, cut, kept);
      for (int64_t i = 0; i < kept; ++i) {
        double sum = 1000.0 * i;
        for (int64_t j = 0; j < n; ++j) sum += double{x[GetParam() ? j * kept + i : i * n + j]} * j;
        ASSERT_EQ(out[i], sum) << kept << " x " << n;
      }
      ASSERT_EQ(out[kept], -1);
    }
  }
}

TEST_P(Kernel, SumsKeepTheirDigits) {
  const int64_t n = 1'000'003;
  std::vector<float> x(n, 0.1F);
  float sum = 0;
  const std::vector<int64_t> geometry =
      GetParam() ? std::vector<int64_t>{n, 1, 1, 1, 0, 1} : std::vector<int64_t>{1, n, n, 1, 1, 0};
  char* const pointers[] = {reinterpret_cast<char*>(x.data()), reinterpret_cast<char*>(&sum)};
  const auto function = compiled(reduction(Fn::kSum, GetParam()));
  ASSERT_NE(function, nullptr);
  function(pointers, geometry.data(), nullptr, 0, 1);
  const double exact = n * double{0.1F};
  EXPECT_NEAR(sum, exact, 4e-7 * exact);
}

TEST_P(Kernel, NanIsTheLargestAndTheSmallest) {
  for (const Fn fn : {Fn::kAmax, Fn::kAmin}) {
    const auto function = compiled(reduction(fn, GetParam()));
    ASSERT_NE(function, nullptr);
    for (int64_t at = 0; at < 40; ++at) {
      std::vector<float> x(40, 1);
      x[at] = NAN;
      float found = 0;
      const std::vector<int64_t> geometry = GetParam() ? std::vector<int64_t>{40, 1, 1, 1, 0, 1}
                                                       : std::vector<int64_t>{1, 40, 40, 1, 1, 0};
      char* const pointers[] = {reinterpret_cast<char*>(x.data()), reinterpret_cast<char*>(&found)};
      function(pointers, geometry.data(), nullptr, 0, 1);
      EXPECT_TRUE(std::isnan(found)) << at;
    }
  }
}

}  // namespace
}  // namespace acc
