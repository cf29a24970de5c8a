#include "lazy/passes/loops.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace acc {
namespace {

using passes::Access;
using passes::Nest;
using Sizes = std::vector<int64_t>;

// The offset that an access has at each turn, in order.
std::vector<int64_t> walk(const Nest& nest, const Access& access) {
  std::vector<int64_t> offsets{access.offset};
  for (size_t i = 0; i < nest.sizes.size(); ++i) {
    std::vector<int64_t> next;
    for (const int64_t offset : offsets) {
      for (int64_t turn = 0; turn < nest.sizes[i]; ++turn) {
        next.push_back(offset + turn * access.strides[i]);
      }
    }
    offsets = std::move(next);
  }
  return offsets;
}

Nest nest_of(Sizes sizes, std::vector<Sizes> strides) {
  Nest nest{std::move(sizes), {}, {}};
  nest.reduced.assign(nest.sizes.size(), false);
  for (Sizes& one : strides) nest.accesses.push_back({0, 6, 0, std::move(one)});
  return nest;
}

TEST(Loops, CoalesceJoinsWhatAllWalkThroughAsOne) {
  Nest nest = nest_of({4, 5, 6}, {{30, 6, 1}, {30, 6, 1}});
  coalesce(nest);
  EXPECT_EQ(nest.sizes, (Sizes{120}));
  EXPECT_EQ(nest.accesses[0].strides, (Sizes{1}));

  nest = nest_of({4, 5, 6}, {{30, 6, 1}, {0, 6, 1}});  // the second is broadcast along the first
  coalesce(nest);
  EXPECT_EQ(nest.sizes, (Sizes{4, 30}));
  EXPECT_EQ(nest.accesses[1].strides, (Sizes{0, 1}));
}

TEST(Loops, SortPutsTheLargestStrideOutermostAndDropsLoopsOfOneTurn) {
  Nest nest = nest_of({3, 1, 4}, {{1, 7, 3}});
  sort_loops(nest, Access(nest.accesses[0]));
  EXPECT_EQ(nest.sizes, (Sizes{4, 3}));
  EXPECT_EQ(nest.accesses[0].strides, (Sizes{3, 1}));
}

TEST(Loops, RefineFindsTheCommonBoundaries) {
  Nest a = nest_of({16, 256}, {{256, 1}, {0, 1}});
  Nest b = nest_of({4096}, {{1}});
  ASSERT_TRUE(refine(a, b));
  EXPECT_EQ(a.sizes, (Sizes{16, 256}));
  EXPECT_EQ(b.sizes, a.sizes);
  EXPECT_EQ(b.accesses[0].strides, (Sizes{256, 1}));

  a = nest_of({64, 64}, {{64, 1}});
  b = nest_of({16, 256}, {{256, 1}});
  ASSERT_TRUE(refine(a, b));
  EXPECT_EQ(a.sizes, (Sizes{16, 4, 64}));

  a = nest_of({4, 6}, {{6, 1}});
  b = nest_of({3, 8}, {{8, 1}});
  EXPECT_FALSE(refine(a, b));
  EXPECT_EQ(a.sizes, (Sizes{4, 6}));
}

TEST(Loops, KnowsWhatIsTouchedTwice) {
  EXPECT_TRUE(passes::is_injective({0, 6, 0, {6, 1}}, Sizes{4, 6}));
  EXPECT_FALSE(passes::is_injective({0, 6, 0, {0, 1}}, Sizes{4, 6}));
  EXPECT_FALSE(passes::is_injective({0, 6, 0, {1, 1}}, Sizes{4, 6}));
  EXPECT_TRUE(passes::is_injective({0, 6, 0, {0, 1}}, Sizes{1, 6}));
}

// Whatever is done to a nest, every access goes through the same offsets at the same turns.
TEST(Loops, ChangesOfANestKeepItsWalks) {
  std::mt19937 random(1);
  int refined = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto pick = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto make = [&](const Sizes& sizes) {
      Nest nest{sizes, std::vector<bool>(sizes.size()), {}};
      for (int i = 0; i < 3; ++i) {
        Access access{0, 6, pick(0, 3), Sizes(sizes.size())};
        int64_t stride = 1;
        for (size_t k = sizes.size(); k-- > 0;) {
          access.strides[k] = pick(0, 3) == 0 ? 0 : stride;
          stride *= sizes[k] * pick(1, 2);
        }
        nest.accesses.push_back(access);
      }
      return nest;
    };
    Sizes sizes;
    for (int64_t dims = pick(1, 4); dims > 0; --dims) sizes.push_back(pick(2, 6));
    Nest a = make(sizes);
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    Nest b = pick(0, 1) == 0 ? make({elements}) : make(sizes);
    std::vector<std::vector<int64_t>> before;
    for (const Nest* nest : {&a, &b}) {
      for (const Access& access : nest->accesses) before.push_back(walk(*nest, access));
    }
    coalesce(a);
    coalesce(b);
    refined += refine(a, b) ? 1 : 0;
    std::vector<std::vector<int64_t>> after;
    for (const Nest* nest : {&a, &b}) {
      for (const Access& access : nest->accesses) after.push_back(walk(*nest, access));
    }
    ASSERT_EQ(before, after) << "round " << round;
  }
  EXPECT_GT(refined, 1000);
}

TEST(Loops, KeptAndReducedLoopsAreNotJoined) {
  Nest nest = nest_of({4, 5, 6}, {{30, 6, 1}});
  nest.reduced = {false, true, true};
  coalesce(nest);
  EXPECT_EQ(nest.sizes, (Sizes{4, 30}));
  EXPECT_EQ(nest.reduced, (std::vector<bool>{false, true}));
  EXPECT_EQ(nest.kept_elements(), 4);
  EXPECT_TRUE(nest.reduces());
}

TEST(Loops, KeptElementsStayWhereTheyAreInTheReducedLoops) {
  Nest kept = nest_of({12}, {{1}});
  Nest whole = nest_of({4, 7, 3}, {{21, 3, 1}});
  whole.reduced = {false, true, false};
  ASSERT_TRUE(spread_kept(kept, whole));
  EXPECT_EQ(kept.sizes, (Sizes{4, 7, 3}));
  EXPECT_EQ(kept.reduced, whole.reduced);
  EXPECT_EQ(kept.accesses[0].strides, (Sizes{3, 0, 1}));
  EXPECT_EQ(whole.accesses[0].strides, (Sizes{21, 3, 1}));

  // The kept loops of the whole nest are split where those of the other end.
  kept = nest_of({2, 6}, {{1, 2}});
  whole = nest_of({12, 5}, {{5, 1}});
  whole.reduced = {false, true};
  ASSERT_TRUE(spread_kept(kept, whole));
  EXPECT_EQ(whole.sizes, (Sizes{2, 6, 5}));
  EXPECT_EQ(whole.accesses[0].strides, (Sizes{30, 5, 1}));
  EXPECT_EQ(kept.accesses[0].strides, (Sizes{1, 2, 0}));

  kept = nest_of({3, 4}, {{4, 1}});
  whole = nest_of({4, 3, 5}, {{15, 5, 1}});
  whole.reduced = {false, false, true};
  EXPECT_FALSE(spread_kept(kept, whole));
  EXPECT_EQ(whole.sizes, (Sizes{4, 3, 5}));
}

}  // namespace
}  // namespace acc
