#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen::host_math_detail {

std::span<const Piece> trigonometric_pieces() {
  static constexpr Piece pieces[] = {
      {"quarter_turns", "splat madd any", R"(
// x = n pi/2 + r with |r| <= pi/4 and a small relative error of r, for |x| <= 1e5; low is what r
// lost when it was rounded. Cody & Waite in double, pi/2 in two parts, the first of 33 bits.
struct Turns_f32 { U32 n; F32 r, low; };
HOST_MATH Turns_f32 turns_f32(F32 x) {
  F32 t = madd_f32(x, 0.636619772f, 12582912.0f);
  F64 d = __builtin_convertvector(t - 12582912.0f, F64);
  F64 s = __builtin_convertvector(x, F64) - d * 0x1.921fb544p+0 - d * 0x1.0b4611a626331p-34;
  F32 r = __builtin_convertvector(s, F32);
  return {(U32)t, r, __builtin_convertvector(s - __builtin_convertvector(r, F64), F32)};
}
// The same without low, in float where sums of products are fused: then the first of three parts of
// 24 bits leaves no error.
HOST_MATH Turns_f32 turns_fused_f32(F32 x) {
#if HOST_MATH_FMA
  F32 t = madd_f32(x, 0.636619772f, 12582912.0f);
  F32 n = 12582912.0f - t;
  F32 r = madd_f32(n, 0x1.921fb4p+0f, x);
  r = madd_f32(n, 0x1.4442dp-24f, r);
  return {(U32)t, madd_f32(n, 0x1.846988p-48f, r), F32{}};
#else
  return turns_f32(x);
#endif
}
HOST_MATH I32 many_turns_i32(F32 x) { return abs_f32(x) > 1e5f; }
// sin r = r + r^3 P(r^2). Own minimax fit, degree 2, |r| < 0.787, relative error 4.2e-9.
HOST_MATH F32 sin_near_zero_f32(F32 r) {
  F32 z = r * r;
  F32 p = madd_f32(z, -0.00019507884f, 0.008332106f);
  p = madd_f32(p, z, -0.16666654f);
  return madd_f32(p * z, r, r);
}
// cos r = 1 - r^2/2 + r^4 P(r^2). Own minimax fit, degree 2, |r| < 0.787, relative error 1.2e-10.
HOST_MATH F32 cos_near_zero_f32(F32 r) {
  F32 z = r * r;
  F32 p = madd_f32(z, 2.4432104e-05f, -0.0013887308f);
  p = madd_f32(p, z, 0.041666646f);
  return madd_f32(z * z, p, madd_f32(z, -0.5f, 1.0f));
}
)",
       true},
      {"sin", "quarter_turns", R"(
extern "C" float sinf(float) noexcept;
// lanes of huge x from libm
static __attribute__((noinline, cold)) void sin_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = sinf((*x)[i]);
}
// Cody & Waite reduction, own minimax polynomials
HOST_MATH F32 sin_f32(F32 x) {
  Turns_f32 t = turns_fused_f32(abs_f32(x));
  F32 y = (t.n & 1u) != 0u ? cos_near_zero_f32(t.r) : sin_near_zero_f32(t.r);
  y = (F32)((U32)y ^ ((t.n & 2u) << 30) ^ sign_u32(x));
  I32 huge = many_turns_i32(x);
  if (__builtin_expect(any_i32(huge), 0)) {
    F32 argument = x, result = y;
    sin_slow_f32(&argument, huge, &result);
    y = result;
  }
  return y;
}
)"},
      {"cos", "quarter_turns", R"(
extern "C" float cosf(float) noexcept;
static __attribute__((noinline, cold)) void cos_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = cosf((*x)[i]);
}
// Cody & Waite reduction, own minimax polynomials
HOST_MATH F32 cos_f32(F32 x) {
  Turns_f32 t = turns_fused_f32(x);
  F32 y = (t.n & 1u) != 0u ? sin_near_zero_f32(t.r) : cos_near_zero_f32(t.r);
  y = (F32)((U32)y ^ (((t.n + 1u) & 2u) << 30));
  I32 huge = many_turns_i32(x);
  if (__builtin_expect(any_i32(huge), 0)) {
    F32 argument = x, result = y;
    cos_slow_f32(&argument, huge, &result);
    y = result;
  }
  return y;
}
)"},
      {"tan", "quarter_turns", R"(
extern "C" float tanf(float) noexcept;
static __attribute__((noinline, cold)) void tan_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = tanf((*x)[i]);
}
// Cody & Waite reduction; tan r = r + r^3 P(r^2), own minimax fit, degree 6, |r| < 0.787, relative
// error 1.4e-9; an odd number of quarter turns gives -1 / tan r
HOST_MATH F32 tan_f32(F32 x) {
  Turns_f32 t = turns_f32(abs_f32(x));
  F32 z = t.r * t.r;
  F32 p = madd_f32(z, 0.0043878537f, 6.980054e-05f);
  p = madd_f32(p, z, 0.010847768f);
  p = madd_f32(p, z, 0.021279378f);
  p = madd_f32(p, z, 0.054059975f);
  p = madd_f32(p, z, 0.1333267f);
  p = madd_f32(p, z, 0.3333335f);
  F32 y = t.r + madd_f32(p * z, t.r, t.low);
  y = (t.n & 1u) != 0u ? -1.0f / y : y;
  y = (F32)((U32)y ^ sign_u32(x));
  I32 huge = many_turns_i32(x);
  if (__builtin_expect(any_i32(huge), 0)) {
    F32 argument = x, result = y;
    tan_slow_f32(&argument, huge, &result);
    y = result;
  }
  return y;
}
)"},
      {"atan", "splat madd", R"(
// x + x^3 P(x^2), own minimax fit, degree 8, |x| <= 1, relative error 3.7e-9; above,
// pi/2 - atan(1/x)
HOST_MATH F32 atan_f32(F32 x) {
  F32 a = abs_f32(x);
  I32 inverse = a > 1.0f;
  F32 t = inverse ? 1.0f / a : a;
  F32 z = t * t;
  F32 p = madd_f32(z, -0.0017997936f, 0.010929761f);
  p = madd_f32(p, z, -0.03118348f);
  p = madd_f32(p, z, 0.057942405f);
  p = madd_f32(p, z, -0.08401542f);
  p = madd_f32(p, z, 0.109512806f);
  p = madd_f32(p, z, -0.14264043f);
  p = madd_f32(p, z, 0.1999853f);
  p = madd_f32(p, z, -0.333333f);
  F32 y = madd_f32(p * z, t, t);
  y = inverse ? (1.57079637f - y) - 4.37113900e-8f : y;
  return (F32)((U32)y | sign_u32(x));
}
)"},
      {"asin_parts", "splat madd sqrt", R"(
// asin of a (0 <= a <= 9/16), or of sqrt((1 - a) / 2) above: at 9/16 and not 1/2, where the latter
// passes 1/2 and its last place doubles. x + x^3 P(x^2): own minimax fit, degree 5, |x| <= 9/16,
// relative error 1.9e-9.
HOST_MATH F32 asin_part_f32(F32 a, I32 large) {
  F32 half = madd_f32(a, -0.5f, 0.5f);
  F32 z = large ? half : a * a;
  F32 s = large ? sqrt_f32(half) : a;
  F32 p = madd_f32(z, 0.047483224f, 0.006743075f);
  p = madd_f32(p, z, 0.03401064f);
  p = madd_f32(p, z, 0.044232205f);
  p = madd_f32(p, z, 0.07502098f);
  p = madd_f32(p, z, 0.16666631f);
  return madd_f32(p * z, s, s);
}
)",
       true},
      {"asin", "asin_parts", R"(
// Abramowitz & Stegun 4.4.32 and half angles: asin x = pi/2 - 2 asin sqrt((1 - x) / 2)
HOST_MATH F32 asin_f32(F32 x) {
  F32 a = abs_f32(x);
  I32 large = a > 0.5625f;
  F32 y = asin_part_f32(a, large);
  y = large ? (1.57079637f - (y + y)) - 4.37113900e-8f : y;
  return (F32)((U32)y | sign_u32(x));
}
)"},
      {"acos", "asin_parts", R"(
// acos x = 2 asin sqrt((1 - x) / 2), pi - acos(-x), pi/2 - asin x
HOST_MATH F32 acos_f32(F32 x) {
  F32 a = abs_f32(x);
  I32 large = a > 0.5625f;
  F32 y = asin_part_f32(a, large);
  F32 twice = y + y;
  F32 outer = x < 0.0f ? (3.14159274f - twice) - 8.74227800e-8f : twice;
  F32 inner = (1.57079637f - (F32)((U32)y | sign_u32(x))) - 4.37113900e-8f;
  return large ? outer : inner;
}
)"},
  };
  return pieces;
}

}  // namespace acc::codegen::host_math_detail
