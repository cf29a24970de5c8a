#include <gtest/gtest.h>

#include <map>
#include <random>

#include "csrc/base/blocks.h"

namespace acc::base {
namespace {

constexpr uint64_t kUnit = Blocks::kAlignment;

uint64_t gaps_in(const Blocks& blocks) {
  uint64_t gaps = 0;
  blocks.for_each_gap([&](uint64_t, uint64_t) { ++gaps; });
  return gaps;
}

TEST(Blocks, TheClosestFitIsTaken) {
  Blocks blocks(16 * kUnit);
  const auto wide = blocks.take(4 * kUnit);
  blocks.take(kUnit);
  const auto narrow = blocks.take(2 * kUnit);
  blocks.take(kUnit);
  blocks.give(*wide);
  blocks.give(*narrow);
  EXPECT_EQ(blocks.take(2 * kUnit - 3), narrow);
  EXPECT_EQ(blocks.take(2 * kUnit), wide);
}

TEST(Blocks, FreedNeighboursBecomeOne) {
  Blocks blocks(3 * kUnit);
  const auto a = blocks.take(kUnit);
  const auto b = blocks.take(kUnit);
  const auto c = blocks.take(kUnit);
  blocks.give(*a);
  blocks.give(*c);
  EXPECT_FALSE(blocks.take(2 * kUnit).has_value());
  blocks.give(*b);
  EXPECT_EQ(gaps_in(blocks), 1U);
  EXPECT_EQ(blocks.take(3 * kUnit), a);
}

TEST(Blocks, NothingIsTakenThatDoesNotFit) {
  Blocks blocks(2 * kUnit);
  EXPECT_FALSE(blocks.take(0).has_value());
  EXPECT_FALSE(blocks.take(2 * kUnit + 1).has_value());
  EXPECT_FALSE(blocks.take(~uint64_t{0}).has_value());
  EXPECT_EQ(blocks.used(), 0U);
  EXPECT_FALSE(Blocks(0).take(1).has_value());
}

TEST(Blocks, NoTwoBlocksOverlapAndNothingIsLost) {
  std::mt19937 random(20261121);
  constexpr uint64_t kCapacity = 4096 * kUnit;
  Blocks blocks(kCapacity);
  std::map<uint64_t, uint64_t> live;
  uint64_t used = 0;
  for (int round = 0; round < 20'000; ++round) {
    if (live.empty() || random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % (64 * kUnit);
      const auto offset = blocks.take(bytes);
      if (!offset.has_value()) continue;
      const uint64_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
      ASSERT_EQ(*offset % kUnit, 0U);
      ASSERT_LE(*offset + rounded, kCapacity);
      const auto next = live.lower_bound(*offset);
      if (next != live.end()) {
        ASSERT_LE(*offset + rounded, next->first);
      }
      if (next != live.begin()) {
        const auto before = std::prev(next);
        ASSERT_LE(before->first + before->second, *offset);
      }
      live.emplace(*offset, rounded);
      used += rounded;
    } else {
      const auto block = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
      blocks.give(block->first);
      used -= block->second;
      live.erase(block);
    }
    ASSERT_EQ(blocks.used(), used);
  }
  for (const auto& [offset, bytes] : live) blocks.give(offset);
  EXPECT_EQ(gaps_in(blocks), 1U);
  EXPECT_EQ(blocks.take(kCapacity), 0U);
}

}  // namespace
}  // namespace acc::base
