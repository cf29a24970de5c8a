#include <string_view>

#include "csrc/base/check.h"
#include "kernels/codegen/host_math.h"
#include "kernels/codegen/host_random.h"
#include "kernels/codegen/render.h"

// The first part of a file of host kernels, with everything that the functions of render_host.cpp
// call but mathematics and random numbers: names end in what they take (to_bf16, cast_I64_F32)
// where C++ cannot tell by type.
namespace acc::codegen {
namespace {

using base::concat;

constexpr std::string_view kVectors = R"(
#if __AVX512F__
#define W 16
#else
#define W 8
#endif
#define VECTOR(type) __attribute__((vector_size(W * sizeof(type))))
typedef unsigned char u8; typedef unsigned char bool8; typedef signed char i8; typedef short i16;
typedef unsigned short u16; typedef unsigned short f16; typedef unsigned short bf16;
typedef int i32; typedef unsigned u32; typedef long i64; typedef unsigned long u64;
typedef float f32; typedef double f64;
typedef u8 U8 VECTOR(u8); typedef i8 I8 VECTOR(i8); typedef i16 I16 VECTOR(i16);
typedef u16 U16 VECTOR(u16); typedef i32 I32 VECTOR(i32); typedef unsigned U32 VECTOR(unsigned);
typedef i64 I64 VECTOR(i64); typedef u64 U64 VECTOR(u64);
typedef f32 F32 VECTOR(f32); typedef f64 F64 VECTOR(f64);
typedef I32 Mask;  // lanes of 0 or -1
#define infinity __builtin_inf()
#define nan __builtin_nan("")

#define MEMORY(type, Vector)                                                                 \
  static inline Vector load(const type* p) {                                                 \
    typedef Vector Loose __attribute__((aligned(sizeof(type)), may_alias));                  \
    return *(const Loose*)p;                                                                 \
  }                                                                                          \
  static inline void store(type* p, Vector v) {                                              \
    typedef Vector Loose __attribute__((aligned(sizeof(type)), may_alias));                  \
    *(Loose*)p = v;                                                                          \
  }                                                                                          \
  static inline Vector gather(const type* p, long s) {                                       \
    Vector v;                                                                                \
    for (int k = 0; k < W; ++k) v[k] = p[k * s];                                             \
    return v;                                                                                \
  }                                                                                          \
  static inline void scatter(type* p, long s, Vector v) {                                    \
    for (int k = 0; k < W; ++k) p[k * s] = v[k];                                             \
  }                                                                                          \
  static inline Vector spread(type x) { return x - Vector{}; }
MEMORY(u8, U8) MEMORY(i8, I8) MEMORY(i16, I16) MEMORY(u16, U16)
MEMORY(i32, I32) MEMORY(i64, I64) MEMORY(f32, F32) MEMORY(f64, F64)

// The rest of a row, shorter than a turn. Once per type and out of line: inlined at each operand
// these loops would be most of a kernel, and of the compiler's time.
template <class T>
static __attribute__((noinline)) void take_strided(const T* from, long step, T* rest, int count,
                                                   int turn) {
  for (int k = 0; k < count; ++k) rest[k] = from[k * step];
  for (int k = count; k < turn; ++k) rest[k] = rest[0];
}
template <class T>
static __attribute__((noinline)) void put_strided(T* to, long step, const T* rest, int count) {
  for (int k = 0; k < count; ++k) to[k * step] = rest[k];
}
#if __AVX2__
// What lies side by side is taken through registers: the read of a vector waits where its memory
// was written piece by piece.
typedef int I32x8 __attribute__((vector_size(32)));
typedef I32x8 LooseI32x8 __attribute__((aligned(4), may_alias));
typedef float F32x8 __attribute__((vector_size(32)));
static inline I32x8 words_below(int count) { return I32x8{0, 1, 2, 3, 4, 5, 6, 7} < count; }
template <class T>
static __attribute__((noinline)) void take_words(const T* from, T* rest, int count, int turn) {
  constexpr int each = sizeof(T) / 4;
  int word[each];
  __builtin_memcpy(word, from, sizeof word);
  I32x8 first;
  for (int k = 0; k < 8; ++k) first[k] = word[k % each];
  for (int at = 0; at < turn * each; at += 8) {
    const I32x8 below = words_below(count * each - at);
    const F32x8* words = (const F32x8*)((const int*)from + at);
    const I32x8 taken = (I32x8)__builtin_ia32_maskloadps256(words, below);
    *(LooseI32x8*)((int*)rest + at) = below ? taken : first;
  }
}
template <class T>
static __attribute__((noinline)) void put_words(T* to, const T* rest, int count) {
  constexpr int each = sizeof(T) / 4;
  for (int at = 0; at < count * each; at += 8) {
    const I32x8 words = *(const LooseI32x8*)((const int*)rest + at);
    __builtin_ia32_maskstoreps256((F32x8*)((int*)to + at), words_below(count * each - at),
                                  (F32x8)words);
  }
}
// The same of types that are a part of a word, of which the last may be incomplete.
template <class T> static inline u32 bits_of(T x) {
  u32 bits = 0;
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}
template <class T>
static __attribute__((noinline)) void take_parts(const T* from, T* rest, int count, int turn) {
  constexpr int parts = 4 / sizeof(T), bits = 8 * sizeof(T);
  const int whole = count / parts, more = count % parts;
  const u32 first = bits_of(*from) * (bits == 8 ? 0x01010101u : 0x00010001u);
  u32 last = first;
  if (count < parts) {
    last = bits_of(*from) | bits_of(from[count / 2]) << bits * (count / 2) |
           bits_of(from[count - 1]) << bits * (count - 1) | first << bits * count;
  } else if (more != 0) {
    __builtin_memcpy(&last, from + count - parts, sizeof last);
    last = last >> bits * (parts - more) | first << bits * more;
  }
  for (int at = 0; at < turn / parts; at += W / parts) {
    const I32x8 below = words_below(whole - at);
    const F32x8* words = (const F32x8*)((const int*)from + at);
    const I32x8 taken = (I32x8)__builtin_ia32_maskloadps256(words, below);
    const I32x8 behind = words_below(whole + 1 - at) ? I32x8{} + (int)last : I32x8{} + (int)first;
    const I32x8 filled = below ? taken : behind;
    __builtin_memcpy(rest + at * parts, &filled, W * sizeof(T));
  }
}
template <class T>
static __attribute__((noinline)) void put_parts(T* to, const T* rest, int count) {
  constexpr int parts = 4 / sizeof(T);
  const int whole = count / parts;
  for (int at = 0; at < whole; at += W / parts) {
    const int left = whole - at < W / parts ? whole - at : W / parts;
    I32x8 words = {};
    // Through registers: a vector of which only a part was just written would be read late.
    for (int k = 0; k < W / parts; ++k) {
      int word;
      __builtin_memcpy(&word, rest + (at + k) * parts, sizeof word);
      words[k] = word;
    }
    __builtin_ia32_maskstoreps256((F32x8*)((int*)to + at), words_below(left), (F32x8)words);
  }
  if (count < parts) {
    to[0] = rest[0];
    to[count / 2] = rest[count / 2];
    to[count - 1] = rest[count - 1];
  } else {
    __builtin_memcpy(to + count - parts, rest + count - parts, 4);
  }
}
template <class T>
static inline void take_rest(const T* from, long step, T* rest, int count, int turn = W) {
  if (step != 1) return take_strided(from, step, rest, count, turn);
  if constexpr (sizeof(T) >= 4) {
    take_words(from, rest, count, turn);
  } else {
    take_parts(from, rest, count, turn);
  }
}
template <class T> static inline void put_rest(T* to, long step, const T* rest, int count) {
  if (step != 1) return put_strided(to, step, rest, count);
  if constexpr (sizeof(T) >= 4) {
    put_words(to, rest, count);
  } else {
    put_parts(to, rest, count);
  }
}
#else
template <class T>
static inline void take_rest(const T* from, long step, T* rest, int count, int turn = W) {
  take_strided(from, step, rest, count, turn);
}
template <class T> static inline void put_rest(T* to, long step, const T* rest, int count) {
  put_strided(to, step, rest, count);
}
#endif

#define CONVERT(v, Vector) __builtin_convertvector(v, Vector)
static inline double as_double(long bits) {
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T> static inline F32 splat_F32(T x) { return (f32)x - F32{}; }
template <class T> static inline F64 splat_F64(T x) { return (f64)x - F64{}; }
template <class T> static inline I32 splat_I32(T x) { return (i32)x - I32{}; }
template <class T> static inline I64 splat_I64(T x) { return (i64)x - I64{}; }
template <class T> static inline Mask splat_Mask(T x) { return Mask{} - (i32)(x != 0); }
static inline F32 count_F32(long first, long step) {
  F32 lane;
  for (int k = 0; k < W; ++k) lane[k] = k;
  return splat_F32(first) + lane * (f32)step;
}

static inline F32 cast_F64_F32(F64 v) { return CONVERT(v, F32); }
static inline F32 cast_I32_F32(I32 v) { return CONVERT(v, F32); }
static inline F32 cast_I64_F32(I64 v) { return CONVERT(v, F32); }
static inline F32 cast_Mask_F32(Mask v) { return CONVERT(v & 1, F32); }
static inline F64 cast_F32_F64(F32 v) { return CONVERT(v, F64); }
static inline F64 cast_I32_F64(I32 v) { return CONVERT(v, F64); }
static inline F64 cast_I64_F64(I64 v) { return CONVERT(v, F64); }
static inline F64 cast_Mask_F64(Mask v) { return CONVERT(v & 1, F64); }
static inline I32 cast_F32_I32(F32 v) { return CONVERT(v, I32); }
static inline I32 cast_F64_I32(F64 v) { return CONVERT(v, I32); }
static inline I32 cast_I64_I32(I64 v) { return CONVERT(v, I32); }
static inline I32 cast_Mask_I32(Mask v) { return v & 1; }
static inline I64 cast_F32_I64(F32 v) { return CONVERT(v, I64); }
static inline I64 cast_F64_I64(F64 v) { return CONVERT(v, I64); }
static inline I64 cast_I32_I64(I32 v) { return CONVERT(v, I64); }
static inline I64 cast_Mask_I64(Mask v) { return CONVERT(v & 1, I64); }
static inline Mask cast_F32_Mask(F32 v) { return v != 0.0f; }
static inline Mask cast_F64_Mask(F64 v) { return CONVERT(v != 0.0, Mask); }
static inline Mask cast_I32_Mask(I32 v) { return v != 0; }
static inline Mask cast_I64_Mask(I64 v) { return CONVERT(v != 0, Mask); }

static inline I32 from_u8(U8 v) { return CONVERT(v, I32); }
static inline I32 from_i8(I8 v) { return CONVERT(v, I32); }
static inline I32 from_i16(I16 v) { return CONVERT(v, I32); }
static inline I32 from_i32(I32 v) { return v; }
static inline I64 from_i64(I64 v) { return v; }
static inline F32 from_f32(F32 v) { return v; }
static inline F64 from_f64(F64 v) { return v; }
static inline Mask from_bool8(U8 v) { return CONVERT(v, I32) != 0; }
static inline I32 to_i32(I32 v) { return v; }
static inline I64 to_i64(I64 v) { return v; }
static inline F32 to_f32(F32 v) { return v; }
static inline F64 to_f64(F64 v) { return v; }
static inline U8 to_bool8(Mask v) { return CONVERT(v & 1, U8); }

static inline F32 from_bf16(U16 v) { return (F32)(CONVERT(v, U32) << 16); }
static inline U16 to_bf16(F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return CONVERT(v != v ? (bits >> 16 | 0x40) : rounded, U16);
}
#if __F16C__
typedef short Half8 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
static inline F32 from_f16(U16 v) {
  F32 result;
  for (int k = 0; k < W; k += 8) {
    Half8 half;
    __builtin_memcpy(&half, (const char*)&v + 2 * k, sizeof half);
    const Float8 wide = __builtin_ia32_vcvtph2ps256(half);
    __builtin_memcpy((char*)&result + 4 * k, &wide, sizeof wide);
  }
  return result;
}
static inline U16 to_f16(F32 v) {
  U16 result;
  for (int k = 0; k < W; k += 8) {
    Float8 wide;
    __builtin_memcpy(&wide, (const char*)&v + 4 * k, sizeof wide);
    const Half8 half = __builtin_ia32_vcvtps2ph256(wide, 0);
    __builtin_memcpy((char*)&result + 2 * k, &half, sizeof half);
  }
  return result;
}
#else
static inline F32 from_f16(U16 v) {
  const U32 bits = CONVERT(v, U32);
  const U32 magnitude = (bits & 0x7fff) << 13;
  const U32 finite = (U32)((F32)magnitude * 0x1p112f);  // rescales denormals too
  const U32 special = magnitude | 0x7f800000;
  return (F32)((magnitude >= (0x7c00u << 13) ? special : finite) | (bits & 0x8000) << 16);
}
static inline U16 to_f16(F32 v) {
  const U32 bits = (U32)v & 0x7fffffff;
  const U32 special = bits > 0x7f800000 ? U32{} + 0x7e00 : U32{} + 0x7c00;
  const U32 denormal = (U32)((F32)bits + 0.5f) - 0x3f000000;
  const U32 normal = (bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13;
  const U32 half = bits >= 0x47800000 ? special : bits < 0x38800000 ? denormal : normal;
  return CONVERT(half | ((U32)v >> 16 & 0x8000), U16);
}
#endif

// Comparisons give masks of lanes as wide as those compared.
static inline Mask mask_of(I32 v) { return v; }
static inline Mask mask_of(I64 v) { return CONVERT(v, Mask); }
template <class T> static inline Mask eq_(T a, T b) { return mask_of(a == b); }
template <class T> static inline Mask ne_(T a, T b) { return mask_of(a != b); }
template <class T> static inline Mask lt_(T a, T b) { return mask_of(a < b); }
template <class T> static inline Mask le_(T a, T b) { return mask_of(a <= b); }
template <class T> static inline Mask gt_(T a, T b) { return mask_of(a > b); }
template <class T> static inline Mask ge_(T a, T b) { return mask_of(a >= b); }
static inline F32 select(Mask m, F32 a, F32 b) { return m ? a : b; }
static inline I32 select(Mask m, I32 a, I32 b) { return m ? a : b; }
static inline F64 select(Mask m, F64 a, F64 b) { return CONVERT(m, I64) ? a : b; }
static inline I64 select(Mask m, I64 a, I64 b) { return CONVERT(m, I64) ? a : b; }
// NaN if either is.
template <class T> static inline T max_(T a, T b) {
  return select(mask_of((a < b) | (b != b)), b, a);
}
template <class T> static inline T min_(T a, T b) {
  return select(mask_of((b < a) | (b != b)), b, a);
}
// Integers wrap around.
#define INTEGERS(I, U)                                                              \
  static inline I add_(I a, I b) { return (I)((U)a + (U)b); }                       \
  static inline I sub_(I a, I b) { return (I)((U)a - (U)b); }                       \
  static inline I mul_(I a, I b) { return (I)((U)a * (U)b); }                       \
  static inline I neg_(I a) { return (I)(-(U)a); }                                  \
  static inline I abs_(I a) { return a < 0 ? neg_(a) : a; }                         \
  static inline I fma_(I a, I b, I c) { return (I)((U)a * (U)b + (U)c); }           \
  static inline void add_to(I& sum, I v) { sum = add_(sum, v); }
INTEGERS(I32, U32) INTEGERS(I64, U64)
static inline F32 neg_(F32 a) { return -a; }
static inline F64 neg_(F64 a) { return -a; }
template <class T> static inline T not_(T a) { return ~a; }
static inline F32 abs_(F32 a) { return (F32)((I32)a & 0x7fffffff); }
static inline F64 abs_(F64 a) { return (F64)((I64)a & 0x7fffffffffffffff); }
static inline F64 fma_(F64 a, F64 b, F64 c) {
#if __FMA__ || __aarch64__
  F64 r;
  for (int k = 0; k < W; ++k) r[k] = __builtin_fma(a[k], b[k], c[k]);
  return r;
#else
  return a * b + c;
#endif
}
// Of reductions: which lanes hold one of `count` elements, and all lanes in one.
static inline Mask lanes_below(int count) {
  Mask lane;
  for (int k = 0; k < W; ++k) lane[k] = k;
  return lane < count;
}
static inline void add_to(F32& sum, F32 v) { sum += v; }
static inline void add_to(F64& sum, F64 v) { sum += v; }
template <class T> static inline auto sum_lanes(T v) {
  for (int n = sizeof v / sizeof v[0] / 2; n > 0; n /= 2) {
    for (int k = 0; k < n; ++k) v[k] += v[k + n];
  }
  return v[0];
}
static inline u32 sum_lanes(I32 v) { return sum_lanes((U32)v); }
static inline u64 sum_lanes(I64 v) { return sum_lanes((U64)v); }
// Sums of float32 in float64. A vector of two registers g++ would keep in memory, and wait for it.
typedef f32 HalfF32 __attribute__((vector_size(sizeof(F32) / 2)));
typedef f64 HalfF64 __attribute__((vector_size(sizeof(F64) / 2)));
typedef i64 HalfI64 __attribute__((vector_size(sizeof(F64) / 2)));
struct Sums {
  HalfF64 low, high;
};
static inline void add_to(Sums& sums, F32 v) {
  HalfF32 halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  sums.low += CONVERT(halves[0], HalfF64);
  sums.high += CONVERT(halves[1], HalfF64);
}
static inline F32 rounded(Sums sums) {
  const HalfF32 halves[2] = {CONVERT(sums.low, HalfF32), CONVERT(sums.high, HalfF32)};
  F32 v;
  __builtin_memcpy(&v, halves, sizeof v);
  return v;
}
static inline f64 sum_lanes(Sums sums) { return sum_lanes(sums.low + sums.high); }
// Sums of float64, and what rounding took from them (Knuth, The Art of Computer Programming 2,
// 4.2.2, theorem B). Of infinities nothing is known to be lost.
struct CompensatedSums {
  HalfF64 low, high, lost_low, lost_high;
};
static inline void add_to(HalfF64& sum, HalfF64& all_lost, HalfF64 v) {
  const HalfF64 next = sum + v;
  const HalfF64 added = next - sum;
  const HalfF64 lost = (sum - (next - added)) + (v - added);
  sum = next;
  all_lost += (HalfF64)((HalfI64)lost & (lost == lost));
}
static inline void add_to(CompensatedSums& sums, F64 v) {
  HalfF64 halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  add_to(sums.low, sums.lost_low, halves[0]);
  add_to(sums.high, sums.lost_high, halves[1]);
}
static inline F64 rounded(CompensatedSums sums) {
  const HalfF64 halves[2] = {sums.low + sums.lost_low, sums.high + sums.lost_high};
  F64 v;
  __builtin_memcpy(&v, halves, sizeof v);
  return v;
}
static inline f64 sum_lanes(CompensatedSums sums) { return sum_lanes(rounded(sums)); }
template <class T> static inline auto max_lanes(T v) {
  for (int n = W / 2; n > 0; n /= 2) {
    for (int k = 0; k < n; ++k) v[k] = v[k] < v[k + n] || v[k + n] != v[k + n] ? v[k + n] : v[k];
  }
  return v[0];
}
template <class T> static inline auto min_lanes(T v) {
  for (int n = W / 2; n > 0; n /= 2) {
    for (int k = 0; k < n; ++k) v[k] = v[k + n] < v[k] || v[k + n] != v[k + n] ? v[k + n] : v[k];
  }
  return v[0];
}
static inline F64 sqrt_(F64 a) {
  F64 r;
  for (int k = 0; k < W; ++k) r[k] = __builtin_sqrt(a[k]);
  return r;
}
static inline F64 rsqrt_(F64 a) { return 1.0 / sqrt_(a); }
static inline F64 reciprocal_(F64 a) { return 1.0 / a; }
)";

}  // namespace

const std::string& host_preamble() {
  static const std::string& text =
      *new std::string(concat(kVectors, host_math(host_math_names()), host_random()));
  return text;
}

}  // namespace acc::codegen
