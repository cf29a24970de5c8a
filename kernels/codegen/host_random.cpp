#include "kernels/codegen/host_random.h"

#include <string_view>

#include "csrc/base/check.h"
#include "kernels/codegen/drawn_math.h"

namespace acc::codegen {
namespace {

constexpr std::string_view kWords = R"(
#define DRAWN static inline
// Philox 4x32-10 (csrc/base/philox.h), a block in each lane, in the lower halves. What is above
// them is of no meaning: products leave it out.
typedef u64 Blocks __attribute__((vector_size(W * sizeof(u32))));
#define LANES (W / 2)
static inline Blocks product(Blocks a, Blocks b) {
#if __AVX512F__
  Blocks c;
  asm("vpmuludq %2, %1, %0" : "=v"(c) : "v"(a), "v"(b));
  return c;
#elif __AVX2__
  Blocks c;
  asm("vpmuludq %2, %1, %0" : "=x"(c) : "x"(a), "x"(b));
  return c;
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}
static inline void rounds(Blocks& x0, Blocks& x1, Blocks& x2, Blocks& x3, u64 seed,
                          u64 offset) {
  x1 = x0 >> 32;
  x2 = offset - Blocks{};
  x3 = (offset >> 32) - Blocks{};
  const Blocks m0 = 0xD2511F53u - Blocks{}, m1 = 0xCD9E8D57u - Blocks{};
  u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Blocks a = product(x0, m0), b = product(x2, m1);
    x0 = (b >> 32) ^ x1 ^ ((u64)key0 - Blocks{});
    x2 = (a >> 32) ^ x3 ^ ((u64)key1 - Blocks{});
    x1 = b;
    x3 = a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}
// The 2 W words of the blocks from `block` on.
static inline void draw_blocks(u32* words, u64 block, u64 seed, u64 offset) {
  Blocks x0, x1, x2, x3;
  for (int k = 0; k < LANES; ++k) x0[k] = block + k;
  rounds(x0, x1, x2, x3, seed, offset);
  const Blocks low = (x0 & 0xFFFFFFFFu) | x1 << 32, high = (x2 & 0xFFFFFFFFu) | x3 << 32;
  u64 pairs[2 * LANES];
  for (int k = 0; k < LANES; ++k) {
    pairs[2 * k] = low[k];
    pairs[2 * k + 1] = high[k];
  }
  __builtin_memcpy(words, pairs, sizeof pairs);
}
// Of elements that are `step` apart: a block for each, of which it has two words.
static inline void draw_apart(u32* even, u32* odd, long first, long step, u64 seed, u64 offset) {
  Blocks x0, x1, x2, x3, index;
  for (int k = 0; k < LANES; ++k) index[k] = first + k * step;
  x0 = index >> 2;
  rounds(x0, x1, x2, x3, seed, offset);
  const Blocks upper = -(index >> 1 & 1);
  const Blocks a = (x0 & ~upper) | (x2 & upper), b = (x1 & ~upper) | (x3 & upper);
  for (int k = 0; k < LANES; ++k) {
    even[k] = (u32)a[k];
    odd[k] = (u32)b[k];
  }
}
// The words of the blocks that N neighbours from `first` on are in; where the first one's are.
template <int N>
static inline long draw(u32 (&words)[N + 2 * W], long first, u64 seed, u64 offset) {
  static_assert(N % (2 * W) == 0, "whole blocks");
  const long skipped = first % 4;
  for (int k = 0; k < N + (skipped != 0) * 2 * W; k += 2 * W) {
    draw_blocks(words + k, (u64)(first - skipped + k) / 4, seed, offset);
  }
  return skipped;
}

// The words of N elements from `first` on, `step` apart.
template <int N> struct Words {
  u32 word[N];
  Words(long first, long step, u64 seed, u64 offset) {
    if (step == 1) {
      u32 drawn[N + 2 * W];
      const long skipped = draw<N>(drawn, first, seed, offset);
      __builtin_memcpy(word, drawn + skipped, sizeof word);
      return;
    }
    u32 odd[LANES];
    for (int k = 0; k < N; k += LANES) {
      draw_apart(word + k, odd, first + k * step, step, seed, offset);
      for (int e = 0; e < LANES; ++e) {
        if ((first + (k + e) * step) & 1) word[k + e] = odd[e];
      }
    }
  }
};
// Of two elements together: one word each for their distance from zero and for an angle, of which
// the first takes the cosine, a sine a quarter of a turn further.
template <int N> struct Pairs {
  u32 radius[N], angle[N];
  Pairs(long first, long step, u64 seed, u64 offset) {
    if (step == 1) {
      u32 drawn[N + 2 * W];
      const long skipped = draw<N>(drawn, first, seed, offset);
      for (int k = 0; k < N; ++k) {
        radius[k] = drawn[(skipped + k) & ~1L];
        angle[k] = drawn[(skipped + k) | 1];
      }
    } else {
      for (int k = 0; k < N; k += LANES) {
        draw_apart(radius + k, angle + k, first + k * step, step, seed, offset);
      }
    }
    for (int k = 0; k < N; ++k) angle[k] += (u32)((first + k * step) & 1 ^ 1) << 30;
  }
};

// Two words in one, of places that are even and `step` apart.
static inline void draw_wide(u64* words, long first, long step, u64 seed, u64 offset) {
  u32 even[LANES], odd[LANES];
  draw_apart(even, odd, first, step, seed, offset);
  for (int k = 0; k < LANES; ++k) words[k] = even[k] | (u64)odd[k] << 32;
}
// Two words each, and what more of them can be drawn with.
template <int N> struct Wide {
  u64 word[N];
  long first, step;
  u64 seed, offset;
  Wide(long first, long step, u64 seed, u64 offset)
      : first(first), step(step), seed(seed), offset(offset) {
    if (step == 1) {
      u32 drawn[2 * N + 2 * W];
      const long skipped = draw<2 * N>(drawn, 2 * first, seed, offset);
      __builtin_memcpy(word, drawn + skipped, sizeof word);
      return;
    }
    for (int k = 0; k < N; k += LANES) {
      draw_wide(word + k, 2 * (first + k * step), 2 * step, seed, offset);
    }
  }
};

)";

constexpr std::string_view kNumbers = R"(
static inline U32 vector_of(const u32* words) {
  U32 v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}
// From 0 to 1, neither of which it is.
static inline F32 open_unit(U32 v) {
  const F32 high = CONVERT((I32)(v >> 16), F32), low = CONVERT((I32)(v & 0xffff), F32);
  return (high * 0x1p16f + low) * 0x1p-32f + 0x1p-33f;
}
// Of positive normal numbers.
static inline F32 drawn_log(F32 x) {
  const U32 bits = (U32)x;
  const I32 exponent = (I32)(bits - 0x3F3504F3u) >> 23;
  const F32 f = (F32)(bits - ((U32)exponent << 23)) - 1.0f;
  return log_of(f, CONVERT(exponent, F32));
}
// The sine of so many 2^-32 of a turn.
static inline F32 drawn_sine(U32 v) {
  const U32 quadrant = (v + 0x20000000u) >> 30;
  const F32 t = CONVERT((I32)(v - (quadrant << 30)), F32) * 0x1p-29f;
  return (F32)((U32)((quadrant & 1) != 0 ? cosine_of(t) : sine_of(t)) ^ (quadrant & 2) << 30);
}

// What is made of them, from the one at `at` on.
template <int N> static inline Mask drawn_(const Words<N>& words, int at, u64 number) {
  // number - 1 is a word, unless no word is below the number
  const Mask below = (Mask)(vector_of(words.word + at) <= (u32)(number - 1) - U32{});
  return below & splat_Mask(number);
}
template <int N> static inline F32 uniform_(const Words<N>& words, int at) {
  return CONVERT((I32)(vector_of(words.word + at) >> 8), F32) * 0x1p-24f;
}
template <int N> static inline F32 exponential_(const Words<N>& words, int at) {
  const F32 value = -drawn_log(open_unit(vector_of(words.word + at)));
  return value > 0x1p-25f ? value : 0x1p-25f - F32{};
}
template <int N> static inline F32 normal_(const Pairs<N>& words, int at) {
  const F32 square = -2.0f * drawn_log(open_unit(vector_of(words.radius + at)));
  return sqrt_f32(square > 0.0f ? square : F32{}) * drawn_sine(vector_of(words.angle + at));
}
// From 0 to before `count`, of which 0 stands for 2^64.
template <int N> static inline I64 integer_(const Wide<N>& words, int at, u64 count) {
  typedef unsigned __int128 Product;
  I64 made;
  for (int k = 0; k < W; ++k) {
    const u64 word = words.word[at + k];
    made[k] = count == 0 ? (i64)word : (i64)((Product)word * count >> 64);
  }
  if (count <= 1ul << 32) return made;
  for (int k = 0; k < W; k += LANES) {
    u64 low[LANES], high[LANES];
    const long first = 4 * (words.first + (at + k) * words.step), step = 4 * words.step;
    draw_wide(low, first, step, words.seed, words.offset);
    draw_wide(high, first + 2, step, words.seed, words.offset);
    for (int e = 0; e < LANES; ++e) {
      const Product carried = (Product)low[e] * count >> 64;
      made[k + e] = (i64)(((Product)high[e] * count + carried) >> 64);
    }
  }
  return made;
}
)";

}  // namespace

std::string host_random() { return base::concat(kWords, kDrawnMath, kNumbers); }

}  // namespace acc::codegen
