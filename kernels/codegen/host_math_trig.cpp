#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen::host_math_detail {

std::span<const Piece> trigonometric_pieces() {
  static constexpr Piece pieces[] = {
      {"turns", "splat madd any", R"(
HOST_MATH I32 many_turns_i32(F32 x) { return abs_f32(x) > 1e5f; }
)",
       true},
      {"half_turns", "turns clamp", R"(
// sin(x - n pi), where that is at most pi/2, for 0 <= x <= 1e5 and 2 n integral. Cody & Waite: r
// has a small relative error, for pi is in three parts of 24 bits, and the first product leaves no
// error if it is fused. sin r = r + r^3 P(r^2), own minimax fit, degree 3, |r| <= pi/2, relative
// error 6.3e-9. Where nothing is fused all of it is done in double, pi in two parts.
HOST_MATH F32 sin_less_half_turns_f32(F32 x, F32 n) {
#if HOST_MATH_FMA
  F32 r = madd_f32(-n, 0x1.921fb4p+1f, x);
  r = madd_f32(-n, 0x1.4442dp-23f, r);
  r = madd_f32(-n, 0x1.846988p-47f, r);
  F32 z = r * r;
  F32 p = madd_f32(z, 2.6060538e-06f, -0.00019809768f);
  p = madd_f32(p, z, 0.008333069f);
  p = madd_f32(p, z, -0.1666666f);
  F32 y = madd_f32(p * z, r, r);
#else
  F64 d = __builtin_convertvector(n, F64);
  F64 r = __builtin_convertvector(x, F64) - d * 0x1.921fb544p+1 - d * 0x1.0b4611a626331p-33;
  F64 z = r * r;
  F64 p = ((z * 2.6060538e-06 - 0.00019809768) * z + 0.008333069) * z - 0.1666666;
  F32 y = __builtin_convertvector(p * z * r + r, F32);
#endif
  // next to 1 rounding errors would lead above it
  return at_least_f32(at_most_f32(y, 1.0f), -1.0f);
}
)",
       true},
      {"sin", "half_turns", R"(
extern "C" float sinf(float) noexcept;
// lanes of huge x from libm
static __attribute__((noinline, cold)) void sin_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = sinf((*x)[i]);
}
// (-1)^n sin(x - n pi): Cody & Waite reduction, own minimax polynomial
HOST_MATH F32 sin_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 shifted = madd_f32(a, 0.318309886f, 12582912.0f);
  F32 y = sin_less_half_turns_f32(a, shifted - 12582912.0f);
  y = (F32)((U32)y ^ ((U32)shifted << 31) ^ sign_u32(x));
  I32 huge = many_turns_i32(x);
  if (__builtin_expect(any_i32(huge), 0)) {
    F32 argument = x, result = y;
    sin_slow_f32(&argument, huge, &result);
    y = result;
  }
  return y;
}
)"},
      {"cos", "half_turns", R"(
extern "C" float cosf(float) noexcept;
static __attribute__((noinline, cold)) void cos_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = cosf((*x)[i]);
}
// -(-1)^n sin(x - (n + 1/2) pi): Cody & Waite reduction, own minimax polynomial
HOST_MATH F32 cos_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 shifted = madd_f32(a, 0.318309886f, -0.5f) + 12582912.0f;
  F32 y = sin_less_half_turns_f32(a, (shifted - 12582912.0f) + 0.5f);
  y = (F32)((U32)y ^ (((U32)shifted + 1u) << 31));
  I32 huge = many_turns_i32(x);
  if (__builtin_expect(any_i32(huge), 0)) {
    F32 argument = x, result = y;
    cos_slow_f32(&argument, huge, &result);
    y = result;
  }
  return y;
}
)"},
      {"tan", "turns", R"(
extern "C" float tanf(float) noexcept;
static __attribute__((noinline, cold)) void tan_slow_f32(const F32* x, I32 huge, F32* y) {
  for (int i = 0; i < W; ++i) if (huge[i]) (*y)[i] = tanf((*x)[i]);
}
// x = n pi/2 + r, |r| <= pi/4, low what r lost when it was rounded: Cody & Waite in double, pi/2 in
// two parts, the first of 33 bits. tan r = r + r^3 P(r^2), own minimax fit, degree 6, relative
// error 1.4e-9; an odd n gives -1 / tan r.
HOST_MATH F32 tan_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 shifted = madd_f32(a, 0.636619772f, 12582912.0f);
  F64 d = __builtin_convertvector(shifted - 12582912.0f, F64);
  F64 s = __builtin_convertvector(a, F64) - d * 0x1.921fb544p+0 - d * 0x1.0b4611a626331p-34;
  F32 r = __builtin_convertvector(s, F32);
  F32 low = __builtin_convertvector(s - __builtin_convertvector(r, F64), F32);
  F32 z = r * r;
  F32 p = madd_f32(z, 0.0043878537f, 6.980054e-05f);
  p = madd_f32(p, z, 0.010847768f);
  p = madd_f32(p, z, 0.021279378f);
  p = madd_f32(p, z, 0.054059975f);
  p = madd_f32(p, z, 0.1333267f);
  p = madd_f32(p, z, 0.3333335f);
  F32 rest = madd_f32(p * z, r, low);
  F32 y = r + rest;
  // what the sum lost is made good in its inverse, whose last place may be half as large
  F32 lost = rest - (y - r);
  F32 q = -1.0f / y;
  y = ((U32)shifted & 1u) != 0u ? madd_f32(q * lost, q, q) : y;
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
