#pragma once

#include <string_view>

namespace acc::codegen {

// The polynomials of random numbers, as text for the preambles of both dialects, which define DRAWN
// and F32. Their steps are those of log_float and `turn` in kernels/library/random_words.cpp, so
// that operators and kernels draw the same bits.
inline constexpr std::string_view kDrawnMath = R"(
// log(2^e (1 + f))
DRAWN F32 log_of(F32 f, F32 e) {
  F32 p = f * 0.0697161147f - 0.114797338f;
  p = p * f + 0.116854199f;
  p = p * f - 0.124256873f;
  p = p * f + 0.142490576f;
  p = p * f - 0.166678023f;
  p = p * f + 0.200007157f;
  p = p * f - 0.249999970f;
  p = p * f + 0.333333312f;
  const F32 square = f * f;
  const F32 small = e * -2.12194440e-4f + (square * f * p - 0.5f * square);
  return e * 0.693359375f + (f + small);
}
// Of t eighths of a turn, between -1 and 1.
DRAWN F32 sine_of(F32 t) {
  const F32 z = t * t;
  F32 s = z * -3.59542907e-5f + 0.00249000680f;
  s = s * z - 0.0807454347f;
  return (s * z + 0.785398161f) * t;
}
DRAWN F32 cosine_of(F32 t) {
  const F32 z = t * t;
  F32 c = z * 3.52979713e-6f - 3.25938586e-4f;
  c = c * z + 0.0158543252f;
  c = c * z - 0.308425135f;
  return c * z + 1.0f;
}
)";

}  // namespace acc::codegen
