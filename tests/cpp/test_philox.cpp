#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>

#include "csrc/base/philox.h"

namespace acc::base {
namespace {

using Words = std::array<uint32_t, 4>;

// The counter of a known answer as (offset, block): its upper and lower two words.
Words draw(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const auto join = [](uint32_t low, uint32_t high) { return low | uint64_t{high} << 32; };
  return philox({join(key[0], key[1]), join(counter[2], counter[3])}, join(counter[0], counter[1]));
}

// The three vectors that the authors publish with Random123 for philox4x32 with ten rounds.
TEST(Philox, GivesTheAuthorsKnownAnswers) {
  EXPECT_EQ(draw({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(draw({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(draw({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, IsAConstantExpression) {
  static_assert(philox({}, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
}

// From the first vector: no negative numbers, and offsets in fours.
TEST(Philox, TellsOtherGeneratorsWhereToBegin) {
  EXPECT_EQ(other_generator_stream({}).seed, 0x2169c58d6627e8d4U);
  EXPECT_EQ(other_generator_stream({}).offset, 0x1b00dbd8bc57ac4cU);
}

TEST(Philox, EveryPartOfKeyAndCounterMatters) {
  std::set<Words> seen = {philox({1, 2}, 3)};
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t flip = uint64_t{1} << bit;
    EXPECT_TRUE(seen.insert(philox({1 ^ flip, 2}, 3)).second) << "seed bit " << bit;
    EXPECT_TRUE(seen.insert(philox({1, 2 ^ flip}, 3)).second) << "offset bit " << bit;
    EXPECT_TRUE(seen.insert(philox({1, 2}, 3 ^ flip)).second) << "block bit " << bit;
  }
}

TEST(Philox, ACallTakesAFixedPieceOfTheStream) {
  EXPECT_EQ(philox_increments(0), 0U);
  EXPECT_EQ(philox_increments(1), 4U);
  EXPECT_EQ(philox_increments(int64_t{1} << 40), 4U);
}

}  // namespace
}  // namespace acc::base
