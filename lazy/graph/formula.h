#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lazy/graph/graph.h"

// What an operator computes element by element, or in reductions, as a formula over its arguments.
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
  kCount,  // in formulas, "count": the number of elements, of the reduced loops if there are some
  kPosition,  // "position": the element's index along the second dimension; float32, exact to 2^24
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
  // Of the random words of the element's index (docs/random.md), which in kernels is a position;
  // their arguments are integers.
  kDrawn,        // "drawn(seed, offset, below)": whether the word is less
  kUniform,      // "uniform(seed, offset)": from 0 to 1, which it is not; these are float32
  kExponential,  // "exponential(seed, offset)": of rate 1
  kNormal,       // "normal(seed, offset)": of mean 0 and deviation 1
  kInteger,      // "integer(seed, offset, count)": from 0 to before it; an int64, as the count is
  // reductions, over the loops that the operator reduces; one value for all their elements
  kSum,
  kAmax,  // NaN if any is
  kAmin,
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

constexpr bool is_arithmetic(Fn fn) { return fn >= Fn::kAdd && fn <= Fn::kPow; }
constexpr bool is_comparison(Fn fn) { return fn >= Fn::kEq && fn <= Fn::kGe; }
constexpr bool is_draw(Fn fn) { return fn >= Fn::kDrawn && fn <= Fn::kInteger; }
constexpr bool is_reduction(Fn fn) { return fn >= Fn::kSum && fn <= Fn::kAmin; }
constexpr bool is_function(Fn fn) { return fn >= Fn::kSqrt; }

// One operation of a formula; inputs are earlier terms.
struct Term {
  Fn fn = Fn::kConstant;
  uint32_t inputs[3] = {0, 0, 0};
  uint32_t argument = 0;  // of kArgument: its place in the schema
  double constant = 0;    // of kConstant
  bool truth = false;     // yields true or false: a comparison, or an argument used as a condition
};

struct Formula {
  std::vector<Term> terms;
  std::vector<uint32_t> results;  // terms, in the order of the operator's results
  struct Write {
    uint32_t argument;
    uint32_t term;
  };
  std::vector<Write> writes;  // arguments that get another value, besides the results
  bool truth() const { return terms[results[0]].truth; }
  // Which dimensions of the first tensor the reductions run over; "": there are none.
  //   "dim"       those in the argument of that name; all, if it is None or empty
  //   "*"         all
  //   "last dims" as many of the last as the argument `dims` has items
  //   "before last dims"  the others
  //   "but 1"     all but the second
  //   "group"     all but the first and the groups of the second (see `along`)
  //   "but group" all but the groups of the second and what is in each
  std::string over;
  // How tensors of fewer dimensions than the first lie along its dimensions.
  //   ""       as PyTorch broadcasts; results along those that are not reduced
  //   "1"      of one dimension: along the second
  //   "but 1"  of one less: along all but the second
  //   "group"  the second dimension is two: as many groups as the argument `group` says, and what
  //            is in each. Of one dimension: along both; of two: along the first and the groups
  std::string along;
  // A copy or a cast: the result is the argument, converted.
  bool converts = false;
};

// The formula of a node, or null: for operators without one, and where an argument that decides
// between formulas (an exponent, the kind of GELU) has a value without one. Formulas are parsed
// once and live for ever.
const Formula* formula_of(const Graph& graph, const Node& node);

// All operators of the table that exist under `name`, for tests.
std::vector<std::string> operators_with_formulas();

// Parses one formula over the arguments named `names`: an expression, or several separated by ','
// for as many results, after any number of definitions "name = expression;". A definition of an
// argument's name writes the argument.
// Throws base::Error with the text and the
// place for what is no formula.
Formula parse_formula(const std::string& text, const std::vector<std::string>& names);

}  // namespace acc::graph
