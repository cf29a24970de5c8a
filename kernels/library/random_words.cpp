#include "kernels/library/random_words.h"

#include <bit>
#include <cmath>
#include <numbers>

// One binary serves every x86-64: these loops are compiled a second time for AVX2 and chosen when
// the library is loaded. FMA is left out on purpose, because contracted products round differently.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define ACC_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define ACC_VECTORISED
#endif

namespace acc::library {
namespace {

constexpr int kGroupBlocks = static_cast<int>(kWordGroup / 4);
constexpr int kGroupPairs = static_cast<int>(kWordGroup / 2);

// The word as a float in (0, 1]: (word + 1/2) / 2^32, rounded. In two halves, because there is no
// vector instruction that converts unsigned words; the sum rounds once.
inline float open_float(uint32_t word) {
  const float high = static_cast<float>(static_cast<int32_t>(word >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(word & 0xFFFF));
  return (high * 0x1p16F + low) * 0x1p-32F + 0x1p-33F;
}

// Natural logarithm of a positive normal number, within 1.5 ULP. With x = 2^e (1 + f), 1 + f
// between sqrt(1/2) and sqrt(2): log(1 + f) = f - f^2/2 + f^3 P(f), where P interpolates at the
// nine Chebyshev nodes (relative error 3.2e-9).
inline float log_float(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t exponent = static_cast<int32_t>(bits - 0x3F3504F3) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0F;
  float p = 0.0697161147F;
  p = p * f - 0.114797338F;
  p = p * f + 0.116854199F;
  p = p * f - 0.124256873F;
  p = p * f + 0.142490576F;
  p = p * f - 0.166678023F;
  p = p * f + 0.200007157F;
  p = p * f - 0.249999970F;
  p = p * f + 0.333333312F;
  const float e = static_cast<float>(exponent);
  const float square = f * f;
  // log 2 in two parts; the first has few bits, so that its product with e is exact.
  const float small = e * -2.12194440e-4F + (square * f * p - 0.5F * square);
  return e * 0.693359375F + (f + small);
}

struct SinCos {
  float sine;
  float cosine;
};

// Sine and cosine of 2 pi word / 2^32. The turn is reduced exactly, in integers, to t pi / 4 with
// |t| <= 1; the polynomials interpolate at Chebyshev nodes (relative errors 3.4e-9 and 6.7e-11).
inline SinCos turn(uint32_t word) {
  const uint32_t quadrant = (word + 0x20000000U) >> 30;
  const float t = static_cast<float>(static_cast<int32_t>(word - (quadrant << 30))) * 0x1p-29F;
  const float z = t * t;
  float s = -3.59542907e-5F;
  s = s * z + 0.00249000680F;
  s = s * z - 0.0807454347F;
  s = (s * z + 0.785398161F) * t;
  float c = 3.52979713e-6F;
  c = c * z - 3.25938586e-4F;
  c = c * z + 0.0158543252F;
  c = c * z - 0.308425135F;
  c = c * z + 1.0F;
  const bool swap = (quadrant & 1) != 0;
  const float sine = swap ? c : s;
  const float cosine = swap ? s : c;
  const uint32_t sine_sign = (quadrant & 2) << 30;
  const uint32_t cosine_sign = ((quadrant + 1) & 2) << 30;
  return {std::bit_cast<float>(std::bit_cast<uint32_t>(sine) ^ sine_sign),
          std::bit_cast<float>(std::bit_cast<uint32_t>(cosine) ^ cosine_sign)};
}

}  // namespace

ACC_VECTORISED
void fill_words(base::Stream stream, uint64_t first_block, int64_t n, uint32_t* words) {
  for (int64_t done = 0; done < n; done += kWordGroup) {
    // Structure of arrays: each round is one loop over the blocks of the group.
    uint32_t x0[kGroupBlocks];
    uint32_t x1[kGroupBlocks];
    uint32_t x2[kGroupBlocks];
    uint32_t x3[kGroupBlocks];
    const uint64_t block = first_block + static_cast<uint64_t>(done / 4);
    for (int i = 0; i < kGroupBlocks; ++i) {
      x0[i] = static_cast<uint32_t>(block + static_cast<uint64_t>(i));
      x1[i] = static_cast<uint32_t>((block + static_cast<uint64_t>(i)) >> 32);
      x2[i] = static_cast<uint32_t>(stream.offset);
      x3[i] = static_cast<uint32_t>(stream.offset >> 32);
    }
    uint32_t key0 = static_cast<uint32_t>(stream.seed);
    uint32_t key1 = static_cast<uint32_t>(stream.seed >> 32);
    for (int round = 0; round < base::kPhiloxRounds; ++round) {
      for (int i = 0; i < kGroupBlocks; ++i) {
        const uint64_t a = uint64_t{x0[i]} * base::kPhiloxMultiplier0;
        const uint64_t b = uint64_t{x2[i]} * base::kPhiloxMultiplier1;
        x0[i] = static_cast<uint32_t>(b >> 32) ^ x1[i] ^ key0;
        x1[i] = static_cast<uint32_t>(b);
        x2[i] = static_cast<uint32_t>(a >> 32) ^ x3[i] ^ key1;
        x3[i] = static_cast<uint32_t>(a);
      }
      key0 += base::kPhiloxWeyl0;
      key1 += base::kPhiloxWeyl1;
    }
    uint32_t* out = words + done;
    for (int i = 0; i < kGroupBlocks; ++i) {
      out[4 * i] = x0[i];
      out[4 * i + 1] = x1[i];
      out[4 * i + 2] = x2[i];
      out[4 * i + 3] = x3[i];
    }
  }
}

ACC_VECTORISED
void normal_floats(const uint32_t* words, int64_t n, float* out) {
  for (int64_t done = 0; done < n; done += kWordGroup) {
    // Apart first, so that the arithmetic runs on consecutive elements.
    uint32_t radius_words[kGroupPairs];
    uint32_t angle_words[kGroupPairs];
    for (int i = 0; i < kGroupPairs; ++i) {
      radius_words[i] = words[done + 2 * i];
      angle_words[i] = words[done + 2 * i + 1];
    }
    float radius[kGroupPairs];
    float sine[kGroupPairs];
    float cosine[kGroupPairs];
    for (int i = 0; i < kGroupPairs; ++i) {
      const float square = -2.0F * log_float(open_float(radius_words[i]));
      radius[i] = square > 0.0F ? square : 0.0F;
    }
    for (int i = 0; i < kGroupPairs; ++i) radius[i] = std::sqrt(radius[i]);
    for (int i = 0; i < kGroupPairs; ++i) {
      const SinCos angle = turn(angle_words[i]);
      sine[i] = angle.sine;
      cosine[i] = angle.cosine;
    }
    for (int i = 0; i < kGroupPairs; ++i) {
      out[done + 2 * i] = radius[i] * cosine[i];
      out[done + 2 * i + 1] = radius[i] * sine[i];
    }
  }
}

ACC_VECTORISED
void exponential_floats(const uint32_t* words, int64_t n, float* out) {
  for (int64_t done = 0; done < n; done += kWordGroup) {
    for (int i = 0; i < kWordGroup; ++i) {
      // The smallest values come from arguments that round to 1: they get the middle of their range
      // instead of zero, which an exponential number never is.
      const float value = -log_float(open_float(words[done + i]));
      out[done + i] = value > 0x1p-25F ? value : 0x1p-25F;
    }
  }
}

ACC_VECTORISED
void flag_floats(const uint32_t* words, int64_t n, uint64_t limit, float* out) {
  // Without a branch, which would be wrong half of the time; in 32 bits, which vectorise.
  const uint32_t last = static_cast<uint32_t>(limit - 1);
  const float yes = limit == 0 ? 0.0F : 1.0F;
  for (int64_t done = 0; done < n; done += kWordGroup) {
    for (int i = 0; i < kWordGroup; ++i) out[done + i] = words[done + i] <= last ? yes : 0.0F;
  }
}

std::array<double, 2> normal_doubles(uint64_t radius, uint64_t angle) {
  const double r = std::sqrt(-2.0 * std::log(open_double(radius)));
  const double phi = 2.0 * std::numbers::pi * unit_double(angle);
  return {r * std::cos(phi), r * std::sin(phi)};
}

}  // namespace acc::library
