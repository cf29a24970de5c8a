#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen::host_math_detail {

std::span<const Piece> exponential_pieces() {
  static constexpr Piece pieces[] = {
      {"exp_parts", "splat madd clamp scale", R"(
// e^x = 2^n e^r with |r| <= ln(2)/2. Cody & Waite: n ln(2) in two parts, the first of 9 bits.
struct ExpParts_f32 { F32 n, shifted, r; };
HOST_MATH ExpParts_f32 exp_parts_f32(F32 x) {
  F32 shifted = madd_f32(x, 1.44269504f, 12582912.0f);
  F32 n = shifted - 12582912.0f;
  F32 r = madd_f32(n, -0.693359375f, x);
  return {n, shifted, madd_f32(n, 2.12194440e-4f, r)};
}
// e^r = 1 + r + r^2 P(r). Own minimax fit, degree 4, |r| < 0.3477, relative error 3.3e-9.
HOST_MATH F32 exp_polynomial_f32(F32 r) {
  F32 p = madd_f32(r, 0.0013844348f, 0.008369544f);
  p = madd_f32(p, r, 0.04166806f);
  p = madd_f32(p, r, 0.16666514f);
  return madd_f32(p, r, 0.49999994f);
}
HOST_MATH F32 exp_near_zero_f32(F32 r) {
  return madd_f32(r * r, exp_polynomial_f32(r), r) + 1.0f;
}
)",
       true},
      {"exp", "exp_parts", R"(
// Cody & Waite reduction, own minimax polynomial
HOST_MATH F32 exp_f32(F32 x) {
  ExpParts_f32 e = exp_parts_f32(at_least_f32(at_most_f32(x, 89.0f), -104.0f));
  return scale_f32(exp_near_zero_f32(e.r), e.shifted);
}
)"},
      {"exp2", "exp_parts", R"(
// 2^x = 2^n e^(r ln 2), r = x - n exact; the polynomial of exp
HOST_MATH F32 exp2_f32(F32 x) {
  x = at_least_f32(at_most_f32(x, 129.0f), -151.0f);
  F32 shifted = x + 12582912.0f;
  F32 r = (x - (shifted - 12582912.0f)) * 0.693147181f;
  return scale_f32(exp_near_zero_f32(r), shifted);
}
)"},
      {"expm1", "exp_parts", R"(
// 2^n (e^r - 1) + (2^n - 1), e^r - 1 = r + r^2 P(r): own minimax fit, degree 5, |r| < 0.3477,
// relative error 3.3e-9
HOST_MATH F32 expm1_f32(F32 x) {
  ExpParts_f32 e = exp_parts_f32(at_least_f32(at_most_f32(x, 89.0f), -30.0f));
  F32 p = madd_f32(e.r, 0.00018768082f, 0.0013925935f);
  p = madd_f32(p, e.r, 0.008334428f);
  p = madd_f32(p, e.r, 0.04166658f);
  p = madd_f32(p, e.r, 0.16666667f);
  p = madd_f32(p, e.r, 0.5f);
  p = madd_f32(e.r * e.r, p, e.r);
  // half of the result, for 2^128 is no float
  F32 t = power_f32(e.shifted - 1.0f);
  F32 y = madd_f32(p, t, t - 0.5f) * 2.0f;
  return (F32)((U32)(e.n == 0.0f ? p : y) | sign_u32(x));
}
)"},
      {"sigmoid", "exp_parts any", R"(
// 1 / (1 + e^-x) = e^x / (1 + e^x), whichever has the exponential e that is at most one. Where it
// is the numerator the rounding errors of r (low) and of 1 + e (lost) are made good in it.
static __attribute__((noinline)) void sigmoid_slow_f32(const F32* x, F32* y) {
  F32 a = (F32)((U32)*x | 0x80000000u);
  ExpParts_f32 parts = exp_parts_f32(at_least_f32(a, -104.0f));
  F32 e = scale_f32(exp_near_zero_f32(parts.r), parts.shifted);
  *y = a > -87.0f ? *y : (*x > 0.0f ? splat_f32(1.0f) : e);
}
HOST_MATH F32 sigmoid_f32(F32 x) {
  F32 a = (F32)((U32)x | 0x80000000u);
  F32 shifted = madd_f32(a, 1.44269504f, 12582912.0f);
  F32 n = shifted - 12582912.0f;
  F32 part = madd_f32(n, -0.693359375f, a);
  F32 r = madd_f32(n, 2.12194440e-4f, part);
  F32 low = madd_f32(n, 2.12194440e-4f, part - r);
  F32 q = r + madd_f32(r * r, exp_polynomial_f32(r), low);
  F32 scale = power_f32(shifted);
  F32 e = (q + 1.0f) * scale;
  F32 d = e + 1.0f;
  F32 lost = e - (d - 1.0f);
  F32 power = (madd_f32(-lost, q + 1.0f, q) + 1.0f) * scale;
  F32 y = (x < 0.0f ? power : splat_f32(1.0f)) / d;
  if (__builtin_expect(any_i32(a < -87.0f), 0)) {
    F32 argument = x, result = y;
    sigmoid_slow_f32(&argument, &result);
    y = result;
  }
  return y;
}
)"},
      {"tanh", "exp_parts", R"(
// 1 - 2 / (e^2x + 1); below 0.625 x + x^3 P(x^2), own minimax fit, degree 4, relative error 4.6e-9
HOST_MATH F32 tanh_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 b = at_most_f32(a, 9.5f);
  ExpParts_f32 e = exp_parts_f32(b + b);
  F32 large = 1.0f - 2.0f / madd_f32(exp_near_zero_f32(e.r), power_f32(e.shifted), 1.0f);
  F32 z = a * a;
  F32 p = madd_f32(z, -0.005692306f, 0.020628182f);
  p = madd_f32(p, z, -0.05373652f);
  p = madd_f32(p, z, 0.13331406f);
  p = madd_f32(p, z, -0.3333328f);
  F32 y = a < 0.625f ? madd_f32(p * z, a, a) : large;
  return (F32)((U32)y | sign_u32(x));
}
)"},
      {"sinh", "exp_parts", R"(
// (e^x - e^-x) / 2; below 1 x + x^3 P(x^2), own minimax fit, degree 3, relative error 3.1e-10
HOST_MATH F32 sinh_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 b = at_most_f32(a, 90.0f);
  ExpParts_f32 e = exp_parts_f32(b);
  F32 half = scale_f32(exp_near_zero_f32(e.r), e.shifted - 1.0f);
  F32 large = half - 0.25f / half;
  F32 z = b * b;
  F32 p = madd_f32(z, 2.7822125e-06f, 0.00019842896f);
  p = madd_f32(p, z, 0.0083333105f);
  p = madd_f32(p, z, 0.16666667f);
  F32 y = a < 1.0f ? madd_f32(p * z, a, a) : large;
  return (F32)((U32)y | sign_u32(x));
}
)"},
      {"cosh", "exp_parts", R"(
// (e^x + e^-x) / 2
HOST_MATH F32 cosh_f32(F32 x) {
  ExpParts_f32 e = exp_parts_f32(at_most_f32(abs_f32(x), 90.0f));
  F32 half = scale_f32(exp_near_zero_f32(e.r), e.shifted - 1.0f);
  return half + 0.25f / half;
}
)"},
  };
  return pieces;
}

std::span<const Piece> logarithm_pieces() {
  static constexpr Piece pieces[] = {
      {"log_parts", "splat madd", R"(
// x = 2^e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), for positive normal x; anything for the others
struct LogParts_f32 { F32 e, f; };
HOST_MATH LogParts_f32 log_parts_f32(F32 x) {
  U32 k = (U32)x - 0x3f3504f3u;
  F32 e = __builtin_convertvector((I32)k >> 23, F32);
  return {e, (F32)((k & 0x7fffffu) + 0x3f3504f3u) - 1.0f};
}
HOST_MATH I32 positive_normal_i32(F32 x) { return (I32)((U32)x + 0x7f800000u) < -0x1000000; }
// log(1 + f) = f + (-f^2/2 + f^3 P(f)): the part in brackets. Own minimax fit, degree 8,
// sqrt(1/2) <= 1 + f <= sqrt(2), relative error of the logarithm 5.8e-9.
HOST_MATH F32 log_rest_f32(F32 f) {
  F32 p = madd_f32(f, 0.05331857f, -0.109327205f);
  p = madd_f32(p, f, 0.12110875f);
  p = madd_f32(p, f, -0.12547524f);
  p = madd_f32(p, f, 0.1420964f);
  p = madd_f32(p, f, -0.16659375f);
  p = madd_f32(p, f, 0.20002222f);
  p = madd_f32(p, f, -0.25000167f);
  p = madd_f32(p, f, 0.33333313f);
  return f * f * madd_f32(p, f, -0.5f);
}
// For the slow ways: denormals times 2^23, and y less the logarithm of that, or what every
// logarithm has where x is no positive finite number. (They are not marked cold: that would leave
// loops over lanes as they are written.)
HOST_MATH F32 log_scale_up_f32(F32 x) {
  return x < 1.17549435e-38f ? x * 8388608.0f : x;
}
HOST_MATH F32 log_ends_f32(F32 x, F32 y, float scale) {
  F32 ends = x < 0.0f ? splat_f32(__builtin_nanf("")) : x;
  ends = x == 0.0f ? splat_f32(-__builtin_inff()) : ends;
  y = x < 1.17549435e-38f ? y - scale : y;
  return ((x > 0.0f) & (x < __builtin_inff())) ? y : ends;
}
)",
       true},
      {"log", "log_parts any", R"(
// e ln(2) + log(1 + f), ln(2) in two parts (Cody & Waite)
HOST_MATH F32 log_normal_f32(F32 x) {
  LogParts_f32 l = log_parts_f32(x);
  F32 y = madd_f32(l.e, -2.12194440e-4f, log_rest_f32(l.f)) + l.f;
  return madd_f32(l.e, 0.693359375f, y);
}
static __attribute__((noinline)) void log_slow_f32(const F32* x, F32* y) {
  F32 up = log_scale_up_f32(*x);
  *y = log_ends_f32(*x, log_normal_f32(up), 15.9423851f);
}
HOST_MATH F32 log_f32(F32 x) {
  F32 y = log_normal_f32(x);
  if (__builtin_expect(any_i32(~positive_normal_i32(x)), 0)) {
    F32 argument = x, result;
    log_slow_f32(&argument, &result);
    y = result;
  }
  return y;
}
)"},
      {"log2", "log_parts any", R"(
// e + log(1 + f) (1 + 0.4427): the logarithm itself is added unrounded (Cephes' way)
HOST_MATH F32 log2_normal_f32(F32 x) {
  LogParts_f32 l = log_parts_f32(x);
  F32 rest = log_rest_f32(l.f);
  F32 y = madd_f32(rest, 0.442695041f, l.f * 0.442695041f);
  return (y + rest + l.f) + l.e;
}
static __attribute__((noinline)) void log2_slow_f32(const F32* x, F32* y) {
  F32 up = log_scale_up_f32(*x);
  *y = log_ends_f32(*x, log2_normal_f32(up), 23.0f);
}
HOST_MATH F32 log2_f32(F32 x) {
  F32 y = log2_normal_f32(x);
  if (__builtin_expect(any_i32(~positive_normal_i32(x)), 0)) {
    F32 argument = x, result;
    log2_slow_f32(&argument, &result);
    y = result;
  }
  return y;
}
)"},
      {"log10", "log_parts any", R"(
// e log10(2) + log(1 + f) log10(e), both constants in two parts (Cephes' way)
HOST_MATH F32 log10_normal_f32(F32 x) {
  LogParts_f32 l = log_parts_f32(x);
  F32 rest = log_rest_f32(l.f);
  F32 y = (l.f + rest) * 7.00731903251827651129e-4f;
  y = madd_f32(l.e, 2.48745663981195213739e-4f, y);
  y = madd_f32(rest, 4.3359375e-1f, y);
  y = madd_f32(l.f, 4.3359375e-1f, y);
  return madd_f32(l.e, 3.0078125e-1f, y);
}
static __attribute__((noinline)) void log10_slow_f32(const F32* x, F32* y) {
  F32 up = log_scale_up_f32(*x);
  *y = log_ends_f32(*x, log10_normal_f32(up), 6.92368990f);
}
HOST_MATH F32 log10_f32(F32 x) {
  F32 y = log10_normal_f32(x);
  if (__builtin_expect(any_i32(~positive_normal_i32(x)), 0)) {
    F32 argument = x, result;
    log10_slow_f32(&argument, &result);
    y = result;
  }
  return y;
}
)"},
      {"log1p", "log_parts any", R"(
// log of 1 + x = 2^e (1 + f), f = (2^-e - 1) + 2^-e x: e from the rounded sum, f from x itself
static __attribute__((noinline)) void log1p_slow_f32(const F32* x, F32* y) {
  F32 u = *x + 1.0f;
  LogParts_f32 l = log_parts_f32(u);
  F32 z = madd_f32(l.e, -2.12194440e-4f, log_rest_f32(l.f)) + l.f;
  z = log_ends_f32(u, madd_f32(l.e, 0.693359375f, z), 0.0f);
  // above 2^25 the 1 does not count
  *y = ((*x >= 33554432.0f) | (u <= 0.0f) | (u != u)) ? z : *y;
}
HOST_MATH F32 log1p_f32(F32 x) {
  U32 k = (U32)(x + 1.0f) - 0x3f3504f3u;
  F32 e = __builtin_convertvector((I32)k >> 23, F32);
  F32 power = (F32)(0x3f800000u - (k & 0xff800000u));
  F32 f = madd_f32(x, power, power - 1.0f);
  F32 y = madd_f32(e, -2.12194440e-4f, log_rest_f32(f)) + f;
  y = (F32)((U32)madd_f32(e, 0.693359375f, y) | sign_u32(x));
  I32 usual = (x > -1.0f) & (x < 1e9f);
  if (__builtin_expect(any_i32(~usual), 0)) {
    F32 argument = x, result = y;
    log1p_slow_f32(&argument, &result);
    y = result;
  }
  return y;
}
)"},
  };
  return pieces;
}

}  // namespace acc::codegen::host_math_detail
