#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen::host_math_detail {

std::span<const Piece> error_function_pieces() {
  static constexpr Piece pieces[] = {
      {"erf", "splat madd", R"(
// own minimax fits: x + x P(x^2), degree 6, below 1 (relative error 1.5e-9); Q(x - 2.5), degree 12,
// from 1 to 4 (5.2e-8). It has to reach 1: 1 + erf(x) must vanish, as callers multiply it by x.
HOST_MATH F32 erf_f32(F32 x) {
  F32 a = abs_f32(x);
  F32 z = a * a;
  F32 p = madd_f32(z, 7.806904e-05f, -0.0007997853f);
  p = madd_f32(p, z, 0.005187162f);
  p = madd_f32(p, z, -0.026853347f);
  p = madd_f32(p, z, 0.11283579f);
  p = madd_f32(p, z, -0.37612626f);
  p = madd_f32(p, z, 0.12837917f);
  F32 t = a - 2.5f;
  F32 q = madd_f32(t, -8.609213e-06f, 2.1314334e-05f);
  q = madd_f32(q, t, 5.8792095e-05f);
  q = madd_f32(q, t, -0.00028033936f);
  q = madd_f32(q, t, 0.00029342627f);
  q = madd_f32(q, t, 0.00057308667f);
  q = madd_f32(q, t, -0.002825237f);
  q = madd_f32(q, t, 0.006101039f);
  q = madd_f32(q, t, -0.0086121f);
  q = madd_f32(q, t, 0.008353954f);
  q = madd_f32(q, t, -0.00544718f);
  q = madd_f32(q, t, 0.0021780168f);
  q = madd_f32(q, t, 0.9995931f);
  F32 y = a < 1.0f ? madd_f32(p, a, a) : q;
  y = a > 3.92f ? splat_f32(1.0f) : y;
  return (F32)((U32)y | sign_u32(x));
}
)"},
      {"erfc", "splat clamp exp2_double scale", R"(
// e^(-x^2) Q(t) / (1 + 2x) in double, t = (x - 2) / (x + 2) (the form of A&S 7.1.26): own minimax
// fit, degree 9, 0 <= x <= 10.06, relative error 1.3e-8; 2 - erfc(-x)
HOST_MATH F32 erfc_f32(F32 x) {
  F32 a = abs_f32(x);
  F64 d = __builtin_convertvector(at_most_f32(a, 10.06f), F64);
  F64 s = d * d * -1.4426950408889634;
  F32 shifted = __builtin_convertvector(s, F32) + 12582912.0f;
  F64 e;
  exp2_near_zero_f64(s - __builtin_convertvector(shifted - 12582912.0f, F64), e);
  F64 u = d * 2.0 + 1.0, v = d + 2.0;
  F64 w = 1.0 / (u * v);
  F64 t = (d - 2.0) * u * w;
  F64 q = t * -0.00040103246260528096 - 0.0012307069730104945;
  q = q * t + 0.0013136045533933842;
  q = q * t + 0.00863231803626714;
  q = q * t - 0.008059765418439339;
  q = q * t - 0.054204464011470214;
  q = q * t + 0.1640553148650971;
  q = q * t - 0.16603141087187442;
  q = q * t - 0.09276397917267727;
  q = q * t + 1.2769783932626138;
  F32 y = scale_f32(__builtin_convertvector(q * e * (v * w), F32), shifted);
  return x < 0.0f ? 2.0f - y : y;
}
)"},
  };
  return pieces;
}

std::span<const Piece> power_pieces() {
  static constexpr Piece pieces[] = {
      {"pow", "log_parts exp2_double scale trunc any", R"(
// 2^(y log2 |x|) in double. log2(1 + f) = s P(s^2), s = f / (2 + f) (the form of A&S 4.1.27): own
// minimax fit, degree 5, relative error 2.7e-14. Ends as in C99 F.9.4.4.
HOST_MATH void log2_times_f64(LogParts_f32 l, F32 y, F64& t) {
  F64 f = __builtin_convertvector(l.f, F64);
  F64 s = f / (f + 2.0);
  F64 z = s * s;
  F64 g = 0.2829087430742967 * z + 0.3199051451050361;
  g = g * z + 0.41220926448563466;
  g = g * z + 0.5770779422607696;
  g = g * z + 0.9617966941136284;
  g = g * z + 2.88539008177785;
  t = (g * s + __builtin_convertvector(l.e, F64)) * __builtin_convertvector(y, F64);
}
// for every x and y
static __attribute__((noinline)) void pow_slow_f32(const F32* base, const F32* exponent,
                                                         F32* power) {
  const F32 inf = splat_f32(__builtin_inff()), one = splat_f32(1.0f), x = *base, y = *exponent;
  F32 a = abs_f32(x);
  LogParts_f32 l = log_parts_f32(log_scale_up_f32(a));
  l.e = a < 1.17549435e-38f ? l.e - 23.0f : l.e;
  F64 t, e;
  log2_times_f64(l, y, t);
  F32 b = __builtin_convertvector(t, F32);
  // what the logarithm of 0 and infinity gives
  b = a == 0.0f ? (F32)((U32)y ^ 0x80000000u) * inf : b;
  b = a == inf ? y * inf : b;
  // out of range: n is 0, so that the argument of 2^r stays small
  F32 shifted = (abs_f32(b) < 160.0f ? b : F32{}) + 12582912.0f;
  exp2_near_zero_f64(t - __builtin_convertvector(shifted - 12582912.0f, F64), e);
  F32 v = scale_f32(__builtin_convertvector(e, F32), shifted);
  v = b >= 160.0f ? inf : v;
  v = b <= -160.0f ? F32{} : v;
  I32 whole = trunc_f32(y) == y;
  I32 odd = whole & (trunc_f32(y * 0.5f) * 2.0f != y);
  v = (F32)((U32)v | ((U32)odd & (U32)x & 0x80000000u));
  v = ((x < 0.0f) & (a < inf) & ~whole) ? splat_f32(__builtin_nanf("")) : v;
  v = ((x != x) | (y != y)) ? x + y : v;
  // 1^y and x^0 even for NaN, (-1)^(+-infinity)
  *power = ((x == one) | (y == 0.0f) | ((a == one) & (abs_f32(y) == inf))) ? one : v;
}
HOST_MATH F32 pow_f32(F32 x, F32 y) {
  F64 t, e;
  log2_times_f64(log_parts_f32(x), y, t);
  F32 b = __builtin_convertvector(t, F32);
  F32 shifted = b + 12582912.0f;
  exp2_near_zero_f64(t - __builtin_convertvector(shifted - 12582912.0f, F64), e);
  F32 v = __builtin_convertvector(e, F32) * power_f32(shifted);
  I32 usual = positive_normal_i32(x) & (abs_f32(b) < 126.0f);
  if (__builtin_expect(any_i32(~usual), 0)) {
    F32 base = x, exponent = y, result;
    pow_slow_f32(&base, &exponent, &result);
    v = result;
  }
  return v;
}
)"},
  };
  return pieces;
}

}  // namespace acc::codegen::host_math_detail
