#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen::host_math_detail {

// A loop over lanes of one builtin becomes one instruction in g++ and clang under the flags that
// host_math.h names; the test looks for that. What kernels have much of names the instruction: g++
// needs a third of the time for a kernel then.
std::span<const Piece> helper_pieces() {
  static constexpr Piece pieces[] = {
      {"splat", "", R"(
HOST_MATH F32 splat_f32(float c) { return F32{} + c; }
HOST_MATH F32 abs_f32(F32 x) { return (F32)((U32)x & 0x7fffffffu); }
HOST_MATH U32 sign_u32(F32 x) { return (U32)x & 0x80000000u; }
// true where |x| is finite
HOST_MATH I32 finite_i32(F32 x) { return ((I32)x & 0x7fffffff) < 0x7f800000; }
)",
       true},
      // clang 14 takes a loop over 16 lanes apart where other loops over lanes surround it.
      {"fused", "", R"(
HOST_MATH F32 fused_f32(F32 a, F32 b, F32 c) {
#if defined(__clang__) && __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#elif defined(__FMA__) && !defined(__clang__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  F32 r = c;
  for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
)",
       true},
      // Sums of products: fused where that is one instruction, else rounded twice.
      {"madd", "fused", R"(
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
#define HOST_MATH_FMA 1
HOST_MATH F32 madd_f32(F32 a, F32 b, F32 c) { return fused_f32(a, b, c); }
#else
#define HOST_MATH_FMA 0
HOST_MATH F32 madd_f32(F32 a, F32 b, F32 c) { return a * b + c; }
#endif
HOST_MATH F32 madd_f32(F32 a, F32 b, float c) { return madd_f32(a, b, F32{} + c); }
HOST_MATH F32 madd_f32(F32 a, float b, F32 c) { return madd_f32(a, F32{} + b, c); }
HOST_MATH F32 madd_f32(F32 a, float b, float c) { return madd_f32(a, F32{} + b, F32{} + c); }
)",
       true},
      {"any", "", R"(
HOST_MATH bool any_i32(I32 mask) {
#if defined(__AVX512DQ__) && defined(__AVX512F__)
  return __builtin_ia32_cvtd2mask512(mask) != 0;
#elif defined(__AVX__)
  return __builtin_ia32_movmskps256((F32)mask) != 0;
#else
  int any = 0;
  for (int i = 0; i < W; ++i) any |= mask[i];
  return any != 0;
#endif
}
)",
       true},
      // NaN stays NaN.
      {"clamp", "splat", R"(
HOST_MATH F32 at_most_f32(F32 x, float limit) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_minps512_mask(splat_f32(limit), x, F32{}, -1, 4);
#elif defined(__AVX__) && !defined(__clang__)
  return __builtin_ia32_minps256(splat_f32(limit), x);
#else
  return x > limit ? splat_f32(limit) : x;
#endif
}
HOST_MATH F32 at_least_f32(F32 x, float limit) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_maxps512_mask(splat_f32(limit), x, F32{}, -1, 4);
#elif defined(__AVX__) && !defined(__clang__)
  return __builtin_ia32_maxps256(splat_f32(limit), x);
#else
  return x < limit ? splat_f32(limit) : x;
#endif
}
)",
       true},
      // y * 2^n, rounded once, for |n| <= 250 and shifted = n + 1.5 * 2^23, whose low bits are
      // those of n. shifted is NaN only where y is. power_f32: 2^n for -127 < n < 128.
      {"scale", "splat", R"(
HOST_MATH F32 power_f32(F32 shifted) { return (F32)(((U32)shifted << 23) + 0x3f800000u); }
HOST_MATH F32 scale_f32(F32 y, F32 shifted) {
#if defined(__AVX512F__)
  return __builtin_ia32_scalefps512_mask(y, shifted - 12582912.0f, F32{}, -1, 4);
#else
  // two factors, each a normal number; the product with the first is exact
  U32 half = ((U32)shifted << 22) & 0xff800000u;
  return y * (F32)(half + 0x3f800000u) * (F32)(((U32)shifted << 23) - half + 0x3f800000u);
#endif
}
)",
       true},
      {"exp2_double", "", R"(
// e = 2^r. Own minimax fit, degree 7, |r| <= 1/2, relative error 1.8e-10. (By reference: g++
// remarks on how vectors of this size are passed.)
HOST_MATH void exp2_near_zero_f64(const F64& r, F64& e) {
  e = 1.5207322222303927e-05 * r + 0.0001546983928267887;
  e = e * r + 0.0013333893072559788;
  e = e * r + 0.009618027078063158;
  e = e * r + 0.0555041035218171;
  e = e * r + 0.2402265119888223;
  e = e * r + 0.693147180728946;
  e = e * r + 0.9999999999616311;
}
)",
       true},
  };
  return pieces;
}

std::span<const Piece> exact_pieces() {
  static constexpr Piece pieces[] = {
      {"sqrt", "", R"(
// IEEE 754 operation
HOST_MATH F32 sqrt_f32(F32 x) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_sqrtps512_mask(x, x, -1, 4);
#elif defined(__AVX__) && !defined(__clang__)
  return __builtin_ia32_sqrtps256(x);
#else
  F32 r = x;
  for (int i = 0; i < W; ++i) r[i] = __builtin_sqrtf(x[i]);
  return r;
#endif
}
)"},
      {"rsqrt", "sqrt", R"(
// two IEEE 754 operations, each correctly rounded
HOST_MATH F32 rsqrt_f32(F32 x) { return 1.0f / sqrt_f32(x); }
)"},
      {"reciprocal", "", R"(
// IEEE 754 operation
HOST_MATH F32 reciprocal_f32(F32 x) { return 1.0f / x; }
)"},
      {"floor", "", R"(
// IEEE 754 operation
HOST_MATH F32 floor_f32(F32 x) {
  F32 r = x;
  for (int i = 0; i < W; ++i) r[i] = __builtin_floorf(x[i]);
  return r;
}
)"},
      {"ceil", "", R"(
// IEEE 754 operation
HOST_MATH F32 ceil_f32(F32 x) {
  F32 r = x;
  for (int i = 0; i < W; ++i) r[i] = __builtin_ceilf(x[i]);
  return r;
}
)"},
      {"trunc", "", R"(
// IEEE 754 operation
HOST_MATH F32 trunc_f32(F32 x) {
  F32 r = x;
  for (int i = 0; i < W; ++i) r[i] = __builtin_truncf(x[i]);
  return r;
}
)"},
      {"round", "", R"(
// IEEE 754 operation, half to even
HOST_MATH F32 round_f32(F32 x) {
  F32 r = x;
  for (int i = 0; i < W; ++i) r[i] = __builtin_rintf(x[i]);
  return r;
}
)"},
      {"fma", "fused", R"(
// IEEE 754 operation; libm's where the machine has none
HOST_MATH F32 fma_f32(F32 a, F32 b, F32 c) { return fused_f32(a, b, c); }
)"},
  };
  return pieces;
}

}  // namespace acc::codegen::host_math_detail
