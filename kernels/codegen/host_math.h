#pragma once

#include <string>
#include <vector>

// The mathematical functions of generated host kernels, as C++ text that needs no header.
//
// The text works on compiler vectors of W lanes; whoever puts a kernel together defines, before it,
//   W      16 where __AVX512F__ is set, else 8 (any power of two from 4 works)
//   F32, F64, I32, U32, I64   vectors of W float, double, int, unsigned, 64-bit integers
// and compiles with -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=off. g++ 11 and
// clang 11, or later, read it. Where the compiler is told of fused multiply-add, it is used.
//
// A function is `static inline F32 exp_f32(F32 x)`, always inlined; pow takes two
// arguments, fma three. Each differs from the exact value by at most two units in the last place,
// over all floats: denormal arguments and results, infinities, NaN and the sign of zero as in C99
// Annex F. sqrt, reciprocal, floor, ceil, trunc, round (half to even) and fma are exact.
// tests/cpp/test_host_math.cpp holds them to that; docs/kernel-math.md lists methods, errors and
// times.
//
// sin, cos, tan (|x| > 1e5) and, on a machine without fused multiply-add, fma call libm for each
// lane: link with -lm. Every name that the text defines ends in _f32, _f64, _i32 or _u32, but for
// the macros HOST_MATH and HOST_MATH_FMA. No other text of host_math() can be in the same file.
namespace acc::codegen {

// Text of the functions called `names` ("exp", "pow", ...) and of what they use, each once, in an
// order that compiles; the same text for the same set of names. Throws base::Error for an unknown
// name.
std::string host_math(const std::vector<std::string>& names);

// Every name that host_math knows, sorted.
std::vector<std::string> host_math_names();

}  // namespace acc::codegen
