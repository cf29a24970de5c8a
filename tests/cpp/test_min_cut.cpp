#include "lazy/passes/min_cut.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace acc {
namespace {

using passes::MinCut;

TEST(MinCut, EachThingGoesWhereItIsCheaper) {
  MinCut cut(3);
  cut.price_left(0, 5);
  cut.price_right(1, 5);
  EXPECT_EQ(cut.run(), (std::vector<bool>{true, false, false}));
}

TEST(MinCut, BeingApartMayCostMoreThanTheWrongSide) {
  MinCut near(2);
  near.price_left(0, 5);
  near.price_right(1, 3);
  near.price_apart(0, 1, 4);
  EXPECT_EQ(near.run(), (std::vector<bool>{true, true}));
  MinCut far(2);
  far.price_left(0, 5);
  far.price_right(1, 3);
  far.price_apart(0, 1, 2);
  EXPECT_EQ(far.run(), (std::vector<bool>{true, false}));
}

TEST(MinCut, WhatOneThingNeedsIsPaidOnce) {
  MinCut cut(3);
  cut.price_left(0, 3);
  cut.price_left(1, 3);
  cut.price_right(2, 5);
  cut.require(0, 2);
  cut.require(1, 2);
  EXPECT_EQ(cut.run(), (std::vector<bool>{true, true, true}));
  MinCut alone(2);
  alone.price_left(0, 3);
  alone.price_right(1, 5);
  alone.require(0, 1);
  EXPECT_EQ(alone.run(), (std::vector<bool>{false, false}));
}

TEST(MinCut, OfEqualSolutionsTheOneWithFewerOnTheRight) {
  MinCut cut(1);
  cut.price_left(0, 4);
  cut.price_right(0, 4);
  EXPECT_EQ(cut.run(), (std::vector<bool>{false}));
}

// All assignments of small random problems.
TEST(MinCut, NoAssignmentIsCheaper) {
  constexpr uint32_t kThings = 8;
  std::mt19937 random(1);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 200; ++round) {
    struct Pair {
      uint32_t one, other;
      int64_t price;
      bool needs;
    };
    std::vector<int64_t> left(kThings), right(kThings);
    std::vector<Pair> pairs;
    MinCut cut(kThings);
    for (uint32_t i = 0; i < kThings; ++i) {
      cut.price_left(i, left[i] = below(2) * below(20));
      cut.price_right(i, right[i] = below(2) * below(20));
    }
    for (int i = 0; i < 12; ++i) {
      const uint32_t one = below(kThings);
      const uint32_t other = (one + 1 + below(kThings - 1)) % kThings;
      const Pair& pair = pairs.emplace_back(Pair{one, other, below(12), below(4) == 0});
      if (pair.needs) {
        cut.require(one, other);
      } else {
        cut.price_apart(one, other, pair.price);
      }
    }
    const auto price = [&](const auto& is_right) {
      int64_t sum = 0;
      for (uint32_t i = 0; i < kThings; ++i) sum += is_right(i) ? right[i] : left[i];
      for (const Pair& pair : pairs) {
        const bool broken = pair.needs ? is_right(pair.one) && !is_right(pair.other)
                                       : is_right(pair.one) != is_right(pair.other);
        if (broken) sum += pair.needs ? MinCut::kNever / kThings : pair.price;
      }
      return sum;
    };
    int64_t best = std::numeric_limits<int64_t>::max();
    for (uint32_t sides = 0; sides < 1U << kThings; ++sides) {
      best = std::min(best, price([&](uint32_t i) { return (sides >> i & 1U) != 0; }));
    }
    const std::vector<bool> found = cut.run();
    EXPECT_EQ(price([&](uint32_t i) { return static_cast<bool>(found[i]); }), best) << round;
  }
}

// As graphs are whose steps are not read for long: deeper than a stack.
TEST(MinCut, PathsAreAsLongAsTheyAre) {
  constexpr uint32_t kThings = 300'000;
  for (const int64_t last : {4, 6}) {
    MinCut cut(kThings);
    cut.price_right(0, 5);
    for (uint32_t i = 1; i < kThings; ++i) cut.price_apart(i - 1, i, 10);
    cut.price_left(kThings - 1, last);
    const std::vector<bool> right = cut.run();
    EXPECT_EQ(std::count(right.begin(), right.end(), last == 6), kThings);
  }
}

}  // namespace
}  // namespace acc
