#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "csrc/base/hash.h"

namespace acc::base {
namespace {

using Words = std::vector<uint64_t>;

Hash128 hash_run(const Words& words) {
  Hasher hasher;
  hasher.add(words.data(), words.size());
  return hasher.finish();
}

Hash128 hash_one_by_one(const Words& words) {
  Hasher hasher;
  for (const uint64_t word : words) hasher.add(word);
  return hasher.finish();
}

Hash128 hash_as_bytes(const Words& words) {
  Hasher hasher;
  hasher.add(static_cast<const void*>(words.data()), words.size() * sizeof(uint64_t));
  return hasher.finish();
}

Hash128 hash_64_twice(const Words& words) {
  return {hash64(words.data(), words.size()), hash64(words.data(), words.size())};
}

struct Function {
  const char* name;
  Hash128 (*call)(const Words&);
};
constexpr Function kFunctions[] = {{"run", hash_run},
                                   {"one by one", hash_one_by_one},
                                   {"bytes", hash_as_bytes},
                                   {"hash64", hash_64_twice}};

Words random_words(std::mt19937_64& random, size_t n) {
  Words words(n);
  for (uint64_t& word : words) word = random();
  return words;
}

// Each half of the 128 bits has to be good on its own: tables use 64 of them.
struct Halves {
  Words lo;
  Words hi;

  void add(const Hash128& hash) {
    lo.push_back(hash.lo);
    hi.push_back(hash.hi);
  }
};

size_t count_repeats(Words& values) {
  std::sort(values.begin(), values.end());
  return static_cast<size_t>(values.end() - std::unique(values.begin(), values.end()));
}

void expect_no_repeats(Halves& halves, const char* what) {
  EXPECT_EQ(count_repeats(halves.lo), 0u) << what << ", low half";
  EXPECT_EQ(count_repeats(halves.hi), 0u) << what << ", high half";
}

// With as many buckets as values, 1/e of the buckets stay empty when the bits are random.
void expect_random_buckets(const Words& values, int shift, const char* what) {
  size_t buckets = 1;
  while (buckets < values.size()) buckets *= 2;
  std::vector<bool> used(buckets);
  for (const uint64_t value : values) used[(value >> shift) & (buckets - 1)] = true;
  const auto occupied = static_cast<double>(std::count(used.begin(), used.end(), true));
  const double load = static_cast<double>(values.size()) / static_cast<double>(buckets);
  const double expected = (1.0 - std::exp(-load)) * static_cast<double>(buckets);
  EXPECT_NEAR(occupied / expected, 1.0, 0.005) << what << ", bits from " << shift;
}

// What a recorder hashes: operator, number of dimensions, sizes, strides, type; differing in one
// small number here or there.
void for_each_signature(const std::function<void(const Words&)>& visit) {
  for (uint64_t op = 0; op < 10; ++op) {
    for (uint64_t dtype = 0; dtype < 5; ++dtype) {
      for (uint64_t batch = 1; batch <= 20; ++batch) {
        for (uint64_t channels = 1; channels <= 40; ++channels) {
          for (uint64_t width = 1; width <= 25; ++width) {
            visit({op, 4, batch, channels, width, width, channels * width * width, width * width,
                   width, 1, dtype, 0});
          }
        }
      }
    }
  }
}

TEST(Hash, IsTheSameInEveryProcessAndOnEveryMachine) {
  EXPECT_EQ(to_hex(Hasher().finish()), "b1279159e386a97739e42c0d28108977");
  EXPECT_EQ(to_hex(hash_run({1, 2, 3})), "e8193640647b58d970af633a645af90c");
  Words words(100);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * i;
  EXPECT_EQ(to_hex(hash_run(words)), "d24ca4f896036f6949361fcd7383dead");
  EXPECT_EQ(hash64(words.data(), 5), 0x8b6efd2a085b533au);
  EXPECT_EQ(hash64(words.data(), words.size()), 0x4917b764e543c221u);
  Hasher hasher;
  hasher.add("aten::add.Tensor");
  hasher.add(-1);
  hasher.add(0.5);
  EXPECT_EQ(to_hex(hasher.finish()), "9c97c2b7059bc5cf2ac29535e02c02d9");
}

TEST(Hash, CanBeComputedAtCompileTime) {
  constexpr std::array<uint64_t, 3> kWords = {1, 2, 3};
  constexpr uint64_t kHash = hash64(kWords.data(), kWords.size());
  EXPECT_EQ(hash64(Words{1, 2, 3}.data(), 3), kHash);
}

TEST(Hash, HexWritesTheHighHalfFirst) {
  EXPECT_EQ(to_hex({0x1, 0xabc}), "0000000000000abc0000000000000001");
}

TEST(Hash, FlippingAnyInputBitFlipsEveryOutputBitHalfOfTheTime) {
  std::mt19937_64 random(1);
  // Around the number of words where the wide path begins, and the smallest.
  for (const size_t n : {1, 2, 3, 11, 12, 13, 15, 16, 17, 40}) {
    for (const Function& function : kFunctions) {
      constexpr int kTrials = 100;
      std::array<std::array<uint32_t, 64>, 2> flips = {};
      uint64_t total = 0;
      double worst_input_bit = 0;
      for (size_t bit = 0; bit < 64 * n; ++bit) {
        uint64_t of_this_bit = 0;
        for (int trial = 0; trial < kTrials; ++trial) {
          Words words = random_words(random, n);
          const Hash128 before = function.call(words);
          words[bit / 64] ^= uint64_t{1} << (bit % 64);
          const Hash128 after = function.call(words);
          const uint64_t changed[] = {before.lo ^ after.lo, before.hi ^ after.hi};
          for (size_t half = 0; half < 2; ++half) {
            of_this_bit += static_cast<uint64_t>(std::popcount(changed[half]));
            for (size_t out = 0; out < 64; ++out) flips[half][out] += changed[half] >> out & 1;
          }
        }
        total += of_this_bit;
        worst_input_bit = std::max(
            worst_input_bit, std::abs(static_cast<double>(of_this_bit) / (128.0 * kTrials) - 0.5));
      }
      const double trials = static_cast<double>(64 * n * kTrials);
      EXPECT_NEAR(static_cast<double>(total) / (128 * trials), 0.5, 0.003)
          << function.name << " of " << n << " words";
      // 6,400 fair coins at least: a deviation of 0.04 is more than six sigma.
      EXPECT_LT(worst_input_bit, 0.04) << function.name << " of " << n << " words";
      for (const auto& half : flips) {
        for (const uint32_t count : half) {
          EXPECT_NEAR(count / trials, 0.5, 0.04) << function.name << " of " << n << " words";
        }
      }
    }
  }
}

// Averages over input bits hide a single bad pair of bits: here each pair is looked at.
TEST(Hash, EveryInputBitFlipsEveryOutputBit) {
  std::mt19937_64 random(2);
  for (const size_t n : {1, 2, 3, 13}) {
    for (const Function& function : kFunctions) {
      constexpr int kTrials = 400;
      double worst = 0;
      for (size_t bit = 0; bit < 64 * n; ++bit) {
        std::array<int, 128> flips = {};
        for (int trial = 0; trial < kTrials; ++trial) {
          Words words = random_words(random, n);
          const Hash128 before = function.call(words);
          words[bit / 64] ^= uint64_t{1} << (bit % 64);
          const Hash128 after = function.call(words);
          for (size_t out = 0; out < 64; ++out) {
            flips[out] += static_cast<int>((before.lo ^ after.lo) >> out & 1);
            flips[out + 64] += static_cast<int>((before.hi ^ after.hi) >> out & 1);
          }
        }
        for (const int count : flips) {
          worst = std::max(worst, std::abs(static_cast<double>(count) / kTrials - 0.5));
        }
      }
      // 400 fair coins: 0.16 is more than six sigma, for about 100,000 pairs.
      EXPECT_LT(worst, 0.16) << function.name << " of " << n << " words";
    }
  }
}

TEST(Hash, AMillionNearlyEqualSignaturesDoNotCollide) {
  for (const Function& function : kFunctions) {
    Halves halves;
    for_each_signature([&](const Words& words) { halves.add(function.call(words)); });
    ASSERT_EQ(halves.lo.size(), 1'000'000u);
    for (const int shift : {0, 20, 44}) {
      expect_random_buckets(halves.lo, shift, function.name);
      expect_random_buckets(halves.hi, shift, function.name);
    }
    expect_no_repeats(halves, function.name);
  }
}

TEST(Hash, AMillionCountersInAnyPositionDoNotCollide) {
  for (const Function& function : kFunctions) {
    for (const size_t position : {0, 5, 19}) {
      Halves halves;
      Words words(20);
      for (uint64_t i = 0; i < 1'000'000; ++i) {
        words[position] = i;
        halves.add(function.call(words));
      }
      expect_no_repeats(halves, function.name);
    }
  }
}

TEST(Hash, InputsThatDifferInTwoBitsDoNotCollide) {
  for (const Function& function : kFunctions) {
    for (const size_t n : {8, 14}) {
      Halves halves;
      Words words(n);
      for (size_t a = 0; a < 64 * n; ++a) {
        words[a / 64] ^= uint64_t{1} << (a % 64);
        for (size_t b = a + 1; b < 64 * n; ++b) {
          words[b / 64] ^= uint64_t{1} << (b % 64);
          halves.add(function.call(words));
          words[b / 64] ^= uint64_t{1} << (b % 64);
        }
        words[a / 64] ^= uint64_t{1} << (a % 64);
      }
      expect_no_repeats(halves, function.name);
    }
  }
}

// The same number in several places (a size that is also a stride) must not cancel itself.
TEST(Hash, ADifferenceRepeatedInSeveralWordsDoesNotCancel) {
  for (const Function& function : kFunctions) {
    Halves halves;
    for (uint32_t places = 1; places < 1u << 14; ++places) {
      for (const uint64_t value : {uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{256},
                                   uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}}) {
        Words words(14);
        for (size_t i = 0; i < words.size(); ++i) words[i] = places >> i & 1 ? value : 0;
        halves.add(function.call(words));
      }
    }
    expect_no_repeats(halves, function.name);
  }
}

// The constants of the rounds as input make factors zero, which must not forget the rest.
TEST(Hash, WordsEqualToTheInternalConstantsDoNotEraseTheState) {
  const Words constants = {detail::kRoot2, detail::kRoot3,  detail::kRoot5,
                           detail::kRoot7, detail::kRoot11, detail::kRoot13};
  for (const Function& function : kFunctions) {
    Halves halves;
    for (const uint64_t first : constants) {
      for (const uint64_t second : constants) {
        for (const size_t n : {2, 20}) {
          for (uint64_t other = 0; other < 1000; ++other) {
            Words words(n, second);
            words.front() = first;
            words.push_back(other);
            halves.add(function.call(words));
            std::rotate(words.begin(), words.end() - 1, words.end());
            halves.add(function.call(words));
          }
        }
      }
    }
    expect_no_repeats(halves, function.name);
  }
}

TEST(Hash, RunsOfZerosOfEveryLengthDiffer) {
  for (const Function& function : kFunctions) {
    Halves halves;
    for (size_t n = 0; n < 2000; ++n) halves.add(function.call(Words(n)));
    expect_no_repeats(halves, function.name);
  }
}

TEST(Hash, OrderMatters) {
  for (const Function& function : kFunctions) {
    for (const size_t n : {2, 11, 12, 30}) {
      Halves halves;
      Words words(n, 5);
      words[0] = 1;
      words[1] = 2;
      for (size_t i = 0; i + 1 < n; ++i) {
        for (size_t j = i + 1; j < n; ++j) {
          Words swapped(n, 5);
          swapped[i] = 1;
          swapped[j] = 2;
          halves.add(function.call(swapped));
          std::swap(swapped[i], swapped[j]);
          halves.add(function.call(swapped));
        }
      }
      expect_no_repeats(halves, function.name);
    }
  }
}

TEST(Hash, WhereARunEndsMatters) {
  const auto texts = [](std::vector<std::string> items) {
    Hasher hasher;
    for (const std::string& item : items) hasher.add(item);
    return hasher.finish();
  };
  Halves halves;
  halves.add(texts({"ab", "c"}));
  halves.add(texts({"a", "bc"}));
  halves.add(texts({"abc"}));
  halves.add(texts({"abc", ""}));
  halves.add(texts({"", "abc"}));
  halves.add(texts({std::string("abc\0", 4)}));
  halves.add(texts({}));
  halves.add(texts({""}));
  halves.add(hash_run({1, 2, 3}));
  halves.add(hash_one_by_one({1, 2, 3}));
  Hasher two_runs;
  const uint64_t words[] = {1, 2, 3};
  two_runs.add(words, 1);
  two_runs.add(words + 1, 2);
  halves.add(two_runs.finish());
  expect_no_repeats(halves, "runs");
}

TEST(Hash, EveryByteOfATextMatters) {
  Halves halves;
  for (size_t length = 1; length <= 40; ++length) {
    std::string text(length, 'x');
    for (char& c : text) {
      for (int value = 0; value < 256; ++value) {
        if (value == 'x') continue;
        c = static_cast<char>(value);
        Hasher hasher;
        hasher.add(text);
        halves.add(hasher.finish());
      }
      c = 'x';
    }
  }
  expect_no_repeats(halves, "texts");
}

TEST(Hash, BytesNeedNoAlignment) {
  const std::string text = "0123456789abcdefghij";
  std::string shifted = " " + text;
  Hasher aligned;
  aligned.add(text);
  Hasher unaligned;
  unaligned.add(static_cast<const void*>(shifted.data() + 1), text.size());
  EXPECT_EQ(aligned.finish(), unaligned.finish());
}

TEST(Hash, IntegersHashByValueAndFloatsByBits) {
  const auto of = [](auto value) {
    Hasher hasher;
    hasher.add(value);
    return hasher.finish();
  };
  enum class Small : uint8_t { Three = 3 };
  EXPECT_EQ(of(int32_t{-3}), of(int64_t{-3}));
  EXPECT_EQ(of(uint8_t{3}), of(Small::Three));
  EXPECT_EQ(of(true), of(1));
  EXPECT_FALSE(of(1) == of(1.0));
  EXPECT_FALSE(of(0.0) == of(-0.0));
  EXPECT_FALSE(of(0.25) == of(0.5));
  EXPECT_EQ(of(std::nan("")), of(std::nan("")));
  const int64_t sizes[] = {4, -1};
  Hasher hasher;
  hasher.add(sizes, 2);
  EXPECT_EQ(hasher.finish(), hash_run({4, ~uint64_t{0}}));
}

TEST(Hash, MoreCanBeAddedAfterFinish) {
  Hasher hasher;
  hasher.add(1);
  const Hash128 first = hasher.finish();
  EXPECT_EQ(hasher.finish(), first);
  hasher.add(2);
  EXPECT_EQ(hasher.finish(), hash_one_by_one({1, 2}));
}

}  // namespace
}  // namespace acc::base
