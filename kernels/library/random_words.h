#pragma once

#include <array>
#include <cstdint>

#include "csrc/base/philox.h"

// Philox words in bulk, and the transformations of words that are worth vectorising. All work on
// whole groups of 128 words (32 blocks), use no fused multiply-add and so give the same bits with
// every instruction set.
namespace acc::library {

inline constexpr int64_t kWordGroup = 128;

// `n` rounded up to whole groups.
constexpr int64_t word_groups(int64_t n) { return (n + kWordGroup - 1) / kWordGroup * kWordGroup; }

// Words 4 * first_block .. 4 * first_block + n - 1 of the stream. `n` is a multiple of kWordGroup.
void fill_words(base::Stream stream, uint64_t first_block, int64_t n, uint32_t* words);

// Standard normal numbers, element i from words i and i^1 (Box and Muller 1958). Their absolute
// value is at most 6.77. `n` is a multiple of kWordGroup.
void normal_floats(const uint32_t* words, int64_t n, float* out);

// Exponentially distributed numbers of rate 1 in [2^-25, 22.9]. `n` is a multiple of kWordGroup.
void exponential_floats(const uint32_t* words, int64_t n, float* out);

// 1 for words below `limit` (at most 2^32), 0 for the others. `n` is a multiple of kWordGroup.
void flag_floats(const uint32_t* words, int64_t n, uint64_t limit, float* out);

// The upper 24 bits as a multiple of 2^-24 in [0, 1).
inline float unit_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24F; }

// Two words as one number: the first holds the low half.
inline uint64_t wide(const uint32_t* words) { return words[0] | uint64_t{words[1]} << 32; }

// The upper 53 bits as a multiple of 2^-53 in [0, 1).
inline double unit_double(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// The upper 52 bits as an odd multiple of 2^-53: in (0, 1), both ends excluded.
inline double open_double(uint64_t bits) {
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

// The two standard normal numbers that two wide words give.
std::array<double, 2> normal_doubles(uint64_t radius, uint64_t angle);

}  // namespace acc::library
