#pragma once

#include <array>
#include <cstdint>

// Philox 4x32-10, the counter-based generator behind every random operator of the device:
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011. A block of four 32-bit words is a pure function of a key and a counter, so any
// thread of any device computes any element by itself. docs/random.md has the mapping from elements
// to words.
namespace acc::base {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

// A piece of a generator's stream: the generator's seed, and an offset that it reserved. The seed
// is the key, the offset the upper half of the counter, so two offsets never share a block.
struct Stream {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// The four words of block number `block` of the stream.
constexpr std::array<uint32_t, 4> philox(Stream stream, uint64_t block) {
  uint32_t key0 = static_cast<uint32_t>(stream.seed);
  uint32_t key1 = static_cast<uint32_t>(stream.seed >> 32);
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                               static_cast<uint32_t>(stream.offset),
                               static_cast<uint32_t>(stream.offset >> 32)};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{x[0]} * kPhiloxMultiplier0;
    const uint64_t b = uint64_t{x[2]} * kPhiloxMultiplier1;
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return x;
}

// How many of the 2^32 words mean "yes" with probability `p` in [0, 1]: those below.
constexpr uint64_t words_below(double p) { return static_cast<uint64_t>(p * 0x1p32 + 0.5); }

// How many offsets one call of a random operator takes, however many numbers it draws: the block
// number alone tells its elements apart. Offsets advance in fours, as those of CUDA's generators
// do.
constexpr uint64_t philox_increments(int64_t numel) { return numel == 0 ? 0 : 4; }

// What of a wide integer is left in the stream of a generator that is not ours: seeds and offsets
// are then no negative numbers, offsets multiples of 4.
inline constexpr int64_t kOtherGeneratorBits = (int64_t{1} << 62) - 4;

// Where such a generator begins to draw for a call of ours that reserved `stream`: the first two
// integers that acc::random_ draws of all of 64 bits.
constexpr Stream other_generator_stream(Stream stream) {
  const std::array<uint32_t, 4> words = philox(stream, 0);
  const auto wide = [&](size_t i) { return words[i] | uint64_t{words[i + 1]} << 32; };
  return {wide(0) & uint64_t{kOtherGeneratorBits}, wide(2) & uint64_t{kOtherGeneratorBits}};
}

}  // namespace acc::base
