#include "csrc/base/check.h"
#include "kernels/codegen/drawn_math.h"
#include "kernels/codegen/render.h"

namespace acc::codegen {
namespace {

using base::concat;

// The functions that kernels call, for one element; the host's are of the same names, for vectors.
// Without headers: CUDA's mathematics and conversions are known to NVRTC.
constexpr std::string_view kPreamble = R"(
typedef unsigned char u8; typedef unsigned char bool8; typedef signed char i8; typedef short i16;
typedef unsigned short u16; typedef unsigned short f16; typedef unsigned short bf16;
typedef unsigned u32; typedef int i32; typedef long i64; typedef float f32; typedef double f64;
typedef i32 I32; typedef i64 I64; typedef f32 F32; typedef f64 F64; typedef bool Mask;
#define DEVICE __device__ __forceinline__
#define DRAWN DEVICE
#define infinity __longlong_as_double(0x7ff0000000000000)
#define nan __longlong_as_double(0x7ff8000000000000)

// Neighbours in memory, read and written at once.
template <class T, int V>
struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Words {
  T v[V];
};

// Known to lie in the GPU's memory, so that it is not looked up where each access goes.
template <class T> DEVICE T* global(char* p) {
  __builtin_assume(__isGlobal(p));
  return (T*)p;
}

// V elements, of which there are `count`.
template <bool WHOLE, int V, class T> DEVICE void take(Words<T, V>& words, const T* p, int count) {
  if (WHOLE) {
    words = *(const Words<T, V>*)p;
  } else {
    for (int e = 0; e < V; ++e) {
      if (e < count) words.v[e] = p[e];
    }
  }
}
template <bool WHOLE, int V, class T> DEVICE void put(T* p, const Words<T, V>& words, int count) {
  if (WHOLE) {
    *(Words<T, V>*)p = words;
  } else {
    for (int e = 0; e < V; ++e) {
      if (e < count) p[e] = words.v[e];
    }
  }
}

// Bytes of memory that each block has.
DEVICE u32 shared_bytes() {
#if __CUDA_ARCH__
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
#else
  return emulated.shared;
#endif
}
// V elements in slot `at` of the block's memory, as words of which those of neighbouring threads
// lie side by side: no two meet in a bank.
template <int V, class T> DEVICE void hold(char* slots, u32 count, u32 at, Words<T, V>& words) {
  constexpr int N = 16 / sizeof(T) < V ? 16 / sizeof(T) : V;
#pragma unroll
  for (int k = 0; k < V / N; ++k) {
    ((Words<T, N>*)slots)[k * count + at] = ((Words<T, N>*)&words)[k];
  }
}
template <int V, class T> DEVICE void recall(char* slots, u32 count, u32 at, Words<T, V>& words) {
  constexpr int N = 16 / sizeof(T) < V ? 16 / sizeof(T) : V;
#pragma unroll
  for (int k = 0; k < V / N; ++k) {
    ((Words<T, N>*)&words)[k] = ((Words<T, N>*)slots)[k * count + at];
  }
}

// Copies N elements from the GPU's memory to a block's. No register waits for 4 bytes and more: all
// that a thread began before it calls `arrive` is under way together. sm_75 knows no such copies.
template <int N, class T> DEVICE void begin_copy(T* to, const T* from) {
  constexpr int BYTES = N * sizeof(T);
#if !__CUDA_ARCH__
  copy_later(to, from, BYTES);
#elif __CUDA_ARCH__ >= 800
  const u32 shared = (u32)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else if constexpr (BYTES >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES)
                 : "memory");
  } else {
    *(Words<T, N>*)to = *(const Words<T, N>*)from;
  }
#else
  *(Words<T, N>*)to = *(const Words<T, N>*)from;
#endif
}
DEVICE void arrive() {
#if !__CUDA_ARCH__
  copy_now();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// Begins to hold V elements of memory, of which there are `count`, in slot `at`.
template <bool WHOLE, int V, class T>
DEVICE void fetch(char* slots, u32 all, u32 at, const T* p, int count) {
  constexpr int N = 16 / sizeof(T) < V ? 16 / sizeof(T) : V, COPIED = WHOLE ? N : 1;
#pragma unroll
  for (int e = 0; e < V; e += COPIED) {
    if (WHOLE || e < count) begin_copy<COPIED>((T*)slots + (e / N * all + at) * N + e % N, p + e);
  }
}

// The call that this block works for: the last that begins with it or before.
DEVICE int call_of(const long* first_blocks, int calls) {
  int call = 0;
  for (int last = calls; last - call > 1;) {
    const int middle = (call + last) / 2;
    if (first_blocks[middle] <= (long)blockIdx.x) {
      call = middle;
    } else {
      last = middle;
    }
  }
  return call;
}

// The words of a Philox block (csrc/base/philox.h): neighbours share one.
struct Words4 {
  long block = -1;
  u32 x0, x1, x2, x3;
};
DEVICE void draw(Words4& words, long index, unsigned long seed, unsigned long offset) {
  if (words.block == index / 4) return;
  words.block = index / 4;
  u32 x0 = (u32)words.block, x1 = (u32)(words.block >> 32);
  u32 x2 = (u32)offset, x3 = (u32)(offset >> 32);
  u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned long a = x0 * 0xD2511F53ul, b = x2 * 0xCD9E8D57ul;
    x0 = (u32)(b >> 32) ^ x1 ^ key0; x1 = (u32)b;
    x2 = (u32)(a >> 32) ^ x3 ^ key1; x3 = (u32)a;
    key0 += 0x9E3779B9u; key1 += 0xBB67AE85u;
  }
  words.x0 = x0; words.x1 = x1; words.x2 = x2; words.x3 = x3;
}
DEVICE u32 word_of(Words4& words, long index, unsigned long seed, unsigned long offset) {
  draw(words, index, seed, offset);
  const u32 low = index & 1 ? words.x1 : words.x0, high = index & 1 ? words.x3 : words.x2;
  return index & 2 ? high : low;
}
)";

constexpr std::string_view kRest = R"(
DEVICE float open_unit(u32 word) {
  return ((float)(int)(word >> 16) * 0x1p16f + (float)(int)(word & 0xffff)) * 0x1p-32f + 0x1p-33f;
}
DEVICE float drawn_log(float x) {
  const u32 bits = __float_as_uint(x);
  const int exponent = (int)(bits - 0x3F3504F3u) >> 23;
  const float f = __uint_as_float(bits - ((u32)exponent << 23)) - 1.0f;
  return log_of(f, (float)exponent);
}
DEVICE float drawn_sine(u32 word) {
  const u32 quadrant = (word + 0x20000000u) >> 30;
  const float t = (float)(int)(word - (quadrant << 30)) * 0x1p-29f;
  const float turned = quadrant & 1 ? cosine_of(t) : sine_of(t);
  return __uint_as_float(__float_as_uint(turned) ^ (quadrant & 2) << 30);
}
DEVICE bool drawn_(Words4& words, long index, unsigned long seed, unsigned long offset,
                   long number) {
  return (long)word_of(words, index, seed, offset) < number;
}
DEVICE float uniform_(Words4& words, long index, unsigned long seed, unsigned long offset) {
  return (float)(int)(word_of(words, index, seed, offset) >> 8) * 0x1p-24f;
}
DEVICE float exponential_(Words4& words, long index, unsigned long seed, unsigned long offset) {
  const float value = -drawn_log(open_unit(word_of(words, index, seed, offset)));
  return value > 0x1p-25f ? value : 0x1p-25f;
}
DEVICE unsigned long wide_of(Words4& words, long at, unsigned long seed, unsigned long offset) {
  draw(words, at, seed, offset);
  return at & 2 ? words.x2 | (unsigned long)words.x3 << 32
                : words.x0 | (unsigned long)words.x1 << 32;
}
// From 0 to before `count`, of which 0 stands for 2^64.
DEVICE long integer_(Words4& words, long index, unsigned long seed, unsigned long offset,
                     unsigned long count) {
  if (count <= 1ul << 32) {
    const unsigned long word = wide_of(words, 2 * index, seed, offset);
    return count == 0 ? word : __umul64hi(word, count);
  }
  const unsigned long low = __umul64hi(wide_of(words, 4 * index, seed, offset), count);
  const unsigned long word = wide_of(words, 4 * index + 2, seed, offset);
  return __umul64hi(word, count) + (word * count + low < low ? 1 : 0);
}
// Of two elements together, the first takes the cosine: a sine a quarter of a turn further.
DEVICE float normal_(Words4& words, long index, unsigned long seed, unsigned long offset) {
  draw(words, index, seed, offset);
  const float square = -2.0f * drawn_log(open_unit(index & 2 ? words.x2 : words.x0));
  const u32 angle = (index & 2 ? words.x3 : words.x1) + (index & 1 ? 0u : 1u << 30);
  return sqrtf(square > 0.0f ? square : 0.0f) * drawn_sine(angle);
}

DEVICE double as_double(long bits) { return __longlong_as_double(bits); }
template <class T> DEVICE F32 splat_F32(T x) { return (F32)x; }
template <class T> DEVICE F64 splat_F64(T x) { return (F64)x; }
template <class T> DEVICE I32 splat_I32(T x) { return (I32)x; }
template <class T> DEVICE I64 splat_I64(T x) { return (I64)x; }
template <class T> DEVICE Mask splat_Mask(T x) { return x != 0; }

#define CAST(A, B) DEVICE B cast_##A##_##B(A v) { return (B)v; }
#define CASTS(A, B, C, D) CAST(A, B) CAST(A, C) CAST(A, D) CAST(A, Mask) CAST(Mask, A)
CASTS(F32, F64, I32, I64) CASTS(F64, F32, I32, I64) CASTS(I32, F32, F64, I64)
CASTS(I64, F32, F64, I32)

DEVICE I32 from_u8(u8 v) { return v; }
DEVICE I32 from_i8(i8 v) { return v; }
DEVICE I32 from_i16(i16 v) { return v; }
DEVICE I32 from_i32(i32 v) { return v; }
DEVICE I64 from_i64(i64 v) { return v; }
DEVICE F32 from_f32(f32 v) { return v; }
DEVICE F64 from_f64(f64 v) { return v; }
DEVICE Mask from_bool8(u8 v) { return v != 0; }
DEVICE i32 to_i32(I32 v) { return v; }
DEVICE i64 to_i64(I64 v) { return v; }
DEVICE f32 to_f32(F32 v) { return v; }
DEVICE f64 to_f64(F64 v) { return v; }
DEVICE u8 to_bool8(Mask v) { return v; }

DEVICE F32 from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u16 to_bf16(F32 v) {
#if __CUDA_ARCH__ >= 800
  u16 half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
#else
  const u32 bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
DEVICE F32 from_f16(u16 v) {
#if __CUDA_ARCH__
  F32 wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v));
  return wide;
#else
  const u32 magnitude = (u32)(v & 0x7fff) << 13;
  const u32 finite = __float_as_uint(__uint_as_float(magnitude) * 0x1p112f);
  const u32 wide = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000 : finite;
  return __uint_as_float(wide | (u32)(v & 0x8000) << 16);
#endif
}
DEVICE u16 to_f16(F32 v) {
#if __CUDA_ARCH__
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
#else
  const u32 sign = __float_as_uint(v) >> 16 & 0x8000;
  const u32 bits = __float_as_uint(v) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= 0x47800000) return (u16)(0x7c00 | sign);
  if (bits >= 0x38800000) return (u16)((bits + 0xc8000fff + (bits >> 13 & 1)) >> 13 | sign);
  return (u16)((__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000) | sign);
#endif
}

template <class T> DEVICE Mask eq_(T a, T b) { return a == b; }
template <class T> DEVICE Mask ne_(T a, T b) { return a != b; }
template <class T> DEVICE Mask lt_(T a, T b) { return a < b; }
template <class T> DEVICE Mask le_(T a, T b) { return a <= b; }
template <class T> DEVICE Mask gt_(T a, T b) { return a > b; }
template <class T> DEVICE Mask ge_(T a, T b) { return a >= b; }
template <class T> DEVICE T select(Mask m, T a, T b) { return m ? a : b; }
// NaN if either is.
template <class T> DEVICE T max_(T a, T b) { return a < b || b != b ? b : a; }
template <class T> DEVICE T min_(T a, T b) { return b < a || b != b ? b : a; }
// Integers wrap around.
#define INTEGERS(I, U)                                                      \
  DEVICE I add_(I a, I b) { return (I)((U)a + (U)b); }                      \
  DEVICE I sub_(I a, I b) { return (I)((U)a - (U)b); }                      \
  DEVICE I mul_(I a, I b) { return (I)((U)a * (U)b); }                      \
  DEVICE I neg_(I a) { return (I)(-(U)a); }                                 \
  DEVICE I abs_(I a) { return a < 0 ? neg_(a) : a; }                        \
  DEVICE I fma_(I a, I b, I c) { return (I)((U)a * (U)b + (U)c); }
INTEGERS(I32, u32) INTEGERS(I64, unsigned long)
DEVICE F32 add_(F32 a, F32 b) { return a + b; }
DEVICE F64 add_(F64 a, F64 b) { return a + b; }
DEVICE F32 neg_(F32 a) { return -a; }
DEVICE F64 neg_(F64 a) { return -a; }
template <class T> DEVICE T not_(T a) { return ~a; }
DEVICE Mask not_(Mask a) { return !a; }
DEVICE F32 abs_(F32 a) { return fabsf(a); }
DEVICE F64 abs_(F64 a) { return fabs(a); }
DEVICE F32 fma_(F32 a, F32 b, F32 c) { return fmaf(a, b, c); }
DEVICE F64 fma_(F64 a, F64 b, F64 c) { return fma(a, b, c); }
DEVICE F32 pow_(F32 a, F32 b) { return powf(a, b); }
DEVICE F64 pow_(F64 a, F64 b) { return pow(a, b); }
#define FUNCTION(name, of_float, of_double)            \
  DEVICE F32 name##_(F32 a) { return of_float(a); }    \
  DEVICE F64 name##_(F64 a) { return of_double(a); }
#define SAME(name) FUNCTION(name, name##f, name)
SAME(sqrt) SAME(rsqrt) SAME(exp) SAME(exp2) SAME(expm1) SAME(log) SAME(log2) SAME(log10) SAME(log1p)
SAME(sin) SAME(cos) SAME(tan) SAME(asin) SAME(acos) SAME(atan) SAME(sinh) SAME(cosh) SAME(tanh)
SAME(erf) SAME(erfc) SAME(floor) SAME(ceil) SAME(trunc)
FUNCTION(round, rintf, rint)
FUNCTION(reciprocal, 1.0f /, 1.0 /)
DEVICE F32 sigmoid_(F32 a) { return 1.0f / (1.0f + expf(-a)); }
DEVICE F64 sigmoid_(F64 a) { return 1.0 / (1.0 + exp(-a)); }

// Reductions, in trees that depend on the shape of the block alone.
struct Sum { template <class T> static DEVICE T of(T a, T b) { return add_(a, b); } };
struct Amax { template <class T> static DEVICE T of(T a, T b) { return max_(a, b); } };
struct Amin { template <class T> static DEVICE T of(T a, T b) { return min_(a, b); } };
// Of what one thread has; a power of two.
template <class Op, int N, class T> DEVICE T fold(T (&part)[N]) {
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2) {
#pragma unroll
    for (int e = 0; e < n; ++e) part[e] = Op::of(part[e], part[e + n]);
  }
  return part[0];
}
// While the largest x is looked for, a sum is of exp(x - base). The base begins with the lowest
// number, below which -infinity adds nothing, and is at most this far below the largest so far.
// Moved by less, errors of many moves would add up; so each leaves little of what was added before.
#define SLACK 1
template <int N> DEVICE void move_base(F32& base, F32 to, F64& all, F32 (&part)[N]) {
  const F32 factor = exp_(base - to);
  base = to;
  all *= factor;
#pragma unroll
  for (int e = 0; e < N; ++e) part[e] *= factor;
}
// Of the threads with the same y; blockDim.x is a multiple of 32. All of them get it.
template <class Op, class T> DEVICE T across_x(T v, long* scratch) {
  for (int n = 16; n > 0; n /= 2) v = Op::of(v, __shfl_xor_sync(0xffffffffu, v, n));
  const unsigned warps = blockDim.x / 32;
  __syncwarp();  // an exchange orders no memory
  if (warps == 1) return v;
  T* part = (T*)scratch + threadIdx.y * warps;
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = part[0];
  for (unsigned i = 1; i < warps; ++i) v = Op::of(v, part[i]);
  return v;
}
// Of the threads with the same x.
template <class Op, class T> DEVICE T across_y(T v, long* scratch) {
  T* part = (T*)scratch + threadIdx.x;
  __syncthreads();
  part[threadIdx.y * blockDim.x] = v;
  __syncthreads();
  v = part[0];
  for (unsigned i = 1; i < blockDim.y; ++i) v = Op::of(v, part[i * blockDim.x]);
  return v;
}

// What blocks leave for those of later stages: `at` of those that begin after so many words. All
// parts of it together, `step` apart: every thread with the same y, or with the same x, gets it.
template <class T> DEVICE T* left(const long* parts, long words, long at) {
  return global<T>((char*)parts[0] + 8 * words) + at;
}
template <class Op, class T>
DEVICE T gathered_x(const T* left, long count, long step, T v, long* scratch) {
  for (long i = threadIdx.x; i < count; i += blockDim.x) v = Op::of(v, left[i * step]);
  return across_x<Op>(v, scratch);
}
template <class Op, class T>
DEVICE T gathered_y(const T* left, long count, long step, T v, long* scratch) {
  for (long i = threadIdx.y; i < count; i += blockDim.y) v = Op::of(v, left[i * step]);
  return across_y<Op>(v, scratch);
}
)";

}  // namespace

const std::string& cuda_preamble() {
  static const std::string& text = *new std::string(concat(kPreamble, kDrawnMath, kRest));
  return text;
}

}  // namespace acc::codegen
