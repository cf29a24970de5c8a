#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lazy/graph/graph.h"

// What an elementwise operator computes, as a formula over its arguments.
//
// The table in formulas.cpp has one line per operator, "aten::addcmul" -> "self + value * tensor1 *
// tensor2", in the order of operations (and so with the rounding) of ATen's CPU kernel. An operator
// that has no formula for its arguments runs as ATen's.
namespace acc::graph {

// Operations on single elements. The names of those that a formula calls are in formula.cpp.
enum class Fn : uint8_t {
  // leaves
  kArgument,  // in formulas: an argument of the operator
  kOperand,   // in kernels: an element of a tensor
  kScalar,    // in kernels: a number that is an argument of the kernel
  kConstant,
  // conversions
  kCast,
  // arithmetic
  kAdd,
  kSub,
  kMul,
  kDiv,
  kFma,  // a * b + c, rounded once where the processor can
  kNeg,
  kAbs,
  kMin,  // NaN if either is
  kMax,
  kPow,
  // comparisons
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  // bits and truth
  kAnd,
  kOr,
  kXor,
  kNot,
  kSelect,  // a ? b : c
  // functions of one number
  kSqrt,
  kRsqrt,
  kReciprocal,
  kExp,
  kExp2,
  kExpm1,
  kLog,
  kLog2,
  kLog10,
  kLog1p,
  kSin,
  kCos,
  kTan,
  kAsin,
  kAcos,
  kAtan,
  kSinh,
  kCosh,
  kTanh,
  kSigmoid,
  kErf,
  kErfc,
  kFloor,
  kCeil,
  kTrunc,
  kRound,  // half to even
};

// Its name in formulas and in kernels ("exp"); "" for leaves.
const char* name_of(Fn fn);

// Number of inputs.
int arity(Fn fn);

constexpr bool is_comparison(Fn fn) { return fn >= Fn::kEq && fn <= Fn::kGe; }
constexpr bool is_function(Fn fn) { return fn >= Fn::kSqrt; }

// One operation of a formula; inputs are earlier terms.
struct Term {
  Fn fn = Fn::kConstant;
  uint32_t inputs[3] = {0, 0, 0};
  uint32_t argument =
      0;  // of kArgument: its place in the schema; after the last: the number of elements
  double constant = 0;  // of kConstant
  bool truth = false;   // yields true or false: a comparison, or an argument used as a condition
};

// The last term is the result.
struct Formula {
  std::vector<Term> terms;
  bool truth() const { return terms.back().truth; }
  // A copy or a cast: the result is the argument, converted.
  bool converts = false;
};

// The formula of a node, or null: for operators without one, and where an argument that decides
// between formulas (an exponent, the kind of GELU) has a value without one. Formulas are parsed
// once and live for ever.
const Formula* formula_of(const Graph& graph, const Node& node);

// All operators of the table that exist under `name`, for tests.
std::vector<std::string> operators_with_formulas();

// Parses one formula over the arguments named `names`. Throws base::Error with the text and the
// place for what is no formula.
Formula parse_formula(const std::string& text, const std::vector<std::string>& names);

}  // namespace acc::graph
