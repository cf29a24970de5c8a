#include "lazy/graph/formula.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <string_view>
#include <utility>

#include "csrc/base/check.h"

namespace acc::graph {
namespace {

struct Named {
  Fn fn;
  const char* name;
  int arity;
};

constexpr std::array kFunctions{
    Named{Fn::kArgument, "", 0},
    Named{Fn::kOperand, "", 0},
    Named{Fn::kScalar, "", 0},
    Named{Fn::kConstant, "", 0},
    Named{Fn::kCount, "count", 0},
    Named{Fn::kPosition, "position", 0},
    Named{Fn::kCast, "cast", 1},
    Named{Fn::kAdd, "add", 2},
    Named{Fn::kSub, "sub", 2},
    Named{Fn::kMul, "mul", 2},
    Named{Fn::kDiv, "div", 2},
    Named{Fn::kFma, "fma", 3},
    Named{Fn::kNeg, "neg", 1},
    Named{Fn::kAbs, "abs", 1},
    Named{Fn::kMin, "min", 2},
    Named{Fn::kMax, "max", 2},
    Named{Fn::kPow, "pow", 2},
    Named{Fn::kEq, "eq", 2},
    Named{Fn::kNe, "ne", 2},
    Named{Fn::kLt, "lt", 2},
    Named{Fn::kLe, "le", 2},
    Named{Fn::kGt, "gt", 2},
    Named{Fn::kGe, "ge", 2},
    Named{Fn::kAnd, "and", 2},
    Named{Fn::kOr, "or", 2},
    Named{Fn::kXor, "xor", 2},
    Named{Fn::kNot, "not", 1},
    Named{Fn::kSelect, "select", 3},
    Named{Fn::kDrawn, "drawn", 3},
    Named{Fn::kUniform, "uniform", 2},
    Named{Fn::kExponential, "exponential", 2},
    Named{Fn::kNormal, "normal", 2},
    Named{Fn::kInteger, "integer", 3},
    Named{Fn::kSum, "sum", 1},
    Named{Fn::kAmax, "amax", 1},
    Named{Fn::kAmin, "amin", 1},
    Named{Fn::kSqrt, "sqrt", 1},
    Named{Fn::kRsqrt, "rsqrt", 1},
    Named{Fn::kReciprocal, "reciprocal", 1},
    Named{Fn::kExp, "exp", 1},
    Named{Fn::kExp2, "exp2", 1},
    Named{Fn::kExpm1, "expm1", 1},
    Named{Fn::kLog, "log", 1},
    Named{Fn::kLog2, "log2", 1},
    Named{Fn::kLog10, "log10", 1},
    Named{Fn::kLog1p, "log1p", 1},
    Named{Fn::kSin, "sin", 1},
    Named{Fn::kCos, "cos", 1},
    Named{Fn::kTan, "tan", 1},
    Named{Fn::kAsin, "asin", 1},
    Named{Fn::kAcos, "acos", 1},
    Named{Fn::kAtan, "atan", 1},
    Named{Fn::kSinh, "sinh", 1},
    Named{Fn::kCosh, "cosh", 1},
    Named{Fn::kTanh, "tanh", 1},
    Named{Fn::kSigmoid, "sigmoid", 1},
    Named{Fn::kErf, "erf", 1},
    Named{Fn::kErfc, "erfc", 1},
    Named{Fn::kFloor, "floor", 1},
    Named{Fn::kCeil, "ceil", 1},
    Named{Fn::kTrunc, "trunc", 1},
    Named{Fn::kRound, "round", 1},
};
static_assert(kFunctions.size() == static_cast<size_t>(Fn::kRound) + 1);

// Recursive descent, in the precedence of C:
//   formula = {name "=" choice ";"} choice {"," choice}
//   choice  = logic ["?" choice ":" choice]      logic   = compare {("&" | "|" | "^") compare}
//   compare = sum [("==" | "<=" | ...) sum]      sum     = product {("+" | "-") product}
//   product = unary {("*" | "/") unary}          unary   = ["-" | "!"] primary
//   primary = number | name | name "(" choice {"," choice} ")" | "(" choice ")"
class Parser {
 public:
  Parser(std::string_view text, const std::vector<std::string>& names)
      : text_(text), names_(names) {}

  Formula run() {
    while (definition()) {
    }
    do {
      formula_.results.push_back(choice());
    } while (take(","));
    skip_space();
    if (at_ != text_.size()) fail("an operator was expected");
    return std::move(formula_);
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    ACC_CHECK(false, "[formula] ", what, " at column ", at_ + 1, " of '", std::string(text_),
              "'. Correct the formula.");
    __builtin_unreachable();
  }

  void skip_space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  bool take(std::string_view token) {
    skip_space();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  uint32_t add(Fn fn, uint32_t a, uint32_t b = 0, uint32_t c = 0) {
    Term term;
    term.fn = fn;
    term.inputs[0] = a;
    term.inputs[1] = b;
    term.inputs[2] = c;
    const bool bits = fn == Fn::kAnd || fn == Fn::kOr || fn == Fn::kXor || fn == Fn::kNot;
    term.truth = is_comparison(fn) || fn == Fn::kDrawn || (bits && formula_.terms[a].truth);
    formula_.terms.push_back(term);
    return static_cast<uint32_t>(formula_.terms.size() - 1);
  }

  bool definition() {
    const size_t begin = at_;
    const std::string_view word = take_name();
    if (word.empty() || !take("=") || text_.substr(at_).starts_with("=")) {
      at_ = begin;
      return false;
    }
    const uint32_t value = choice();
    if (!take(";")) fail("';' was expected");
    const auto argument = std::ranges::find(names_, word);
    if (argument == names_.end()) {
      defined_.emplace_back(word, value);
    } else {
      formula_.writes.push_back({static_cast<uint32_t>(argument - names_.begin()), value});
    }
    return true;
  }

  uint32_t choice() {
    const uint32_t condition = logic();
    if (!take("?")) return condition;
    // An argument that is a condition keeps its type.
    formula_.terms[condition].truth = true;
    const uint32_t yes = choice();
    if (!take(":")) fail("':' was expected");
    const uint32_t no = choice();
    return add(Fn::kSelect, condition, yes, no);
  }

  uint32_t logic() {
    uint32_t left = compare();
    for (;;) {
      if (take("&")) {
        left = add(Fn::kAnd, left, compare());
      } else if (take("|")) {
        left = add(Fn::kOr, left, compare());
      } else if (take("^")) {
        left = add(Fn::kXor, left, compare());
      } else {
        return left;
      }
    }
  }

  uint32_t compare() {
    const uint32_t left = sum();
    static constexpr std::array<std::pair<const char*, Fn>, 6> kOperators{{{"==", Fn::kEq},
                                                                           {"!=", Fn::kNe},
                                                                           {"<=", Fn::kLe},
                                                                           {">=", Fn::kGe},
                                                                           {"<", Fn::kLt},
                                                                           {">", Fn::kGt}}};
    for (const auto& [token, fn] : kOperators) {
      if (take(token)) return add(fn, left, sum());
    }
    return left;
  }

  uint32_t sum() {
    uint32_t left = product();
    for (;;) {
      if (take("+")) {
        left = add(Fn::kAdd, left, product());
      } else if (take("-")) {
        left = add(Fn::kSub, left, product());
      } else {
        return left;
      }
    }
  }

  uint32_t product() {
    uint32_t left = unary();
    for (;;) {
      if (take("*")) {
        left = add(Fn::kMul, left, unary());
      } else if (take("/")) {
        left = add(Fn::kDiv, left, unary());
      } else {
        return left;
      }
    }
  }

  uint32_t unary() {
    if (take("-")) return add(Fn::kNeg, unary());
    skip_space();
    if (!text_.substr(at_).starts_with("!=") && take("!")) return add(Fn::kNot, unary());
    return primary();
  }

  uint32_t primary() {
    if (take("(")) {
      const uint32_t inner = choice();
      if (!take(")")) fail("')' was expected");
      return inner;
    }
    skip_space();
    if (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) return number();
    return name();
  }

  uint32_t number() {
    Term term;
    const auto [end, error] =
        std::from_chars(text_.data() + at_, text_.data() + text_.size(), term.constant);
    if (error != std::errc()) fail("a number was expected");
    at_ = static_cast<size_t>(end - text_.data());
    formula_.terms.push_back(term);
    return static_cast<uint32_t>(formula_.terms.size() - 1);
  }

  std::string_view take_name() {
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_')) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  uint32_t name() {
    const std::string_view word = take_name();
    if (word.empty()) fail("a name was expected");
    if (take("(")) return call(word);
    for (const auto& [defined, value] : defined_) {
      if (word == defined) return value;
    }
    Term term;
    if (const auto found = std::ranges::find(names_, word); found != names_.end()) {
      term.fn = Fn::kArgument;
      term.argument = static_cast<uint32_t>(found - names_.begin());
    } else if (word == name_of(Fn::kCount)) {
      term.fn = Fn::kCount;
    } else if (word == name_of(Fn::kPosition)) {
      term.fn = Fn::kPosition;
    } else {
      fail("this operator has no argument of the name that ends");
    }
    formula_.terms.push_back(term);
    return static_cast<uint32_t>(formula_.terms.size() - 1);
  }

  uint32_t call(std::string_view word) {
    std::array<uint32_t, 3> inputs{};
    int count = 0;
    do {
      if (count == 3) fail("at most three arguments were expected");
      inputs[static_cast<size_t>(count++)] = choice();
    } while (take(","));
    if (!take(")")) fail("')' was expected");
    for (const Named& function : kFunctions) {
      if (function.arity == count && word == function.name) {
        return add(function.fn, inputs[0], inputs[1], inputs[2]);
      }
    }
    fail("there is no such function of so many arguments");
  }

  std::string_view text_;
  const std::vector<std::string>& names_;
  size_t at_ = 0;
  std::vector<std::pair<std::string_view, uint32_t>> defined_;
  Formula formula_;
};

}  // namespace

const char* name_of(Fn fn) { return kFunctions[static_cast<size_t>(fn)].name; }

int arity(Fn fn) { return kFunctions[static_cast<size_t>(fn)].arity; }

Formula parse_formula(const std::string& text, const std::vector<std::string>& names) {
  return Parser(text, names).run();
}

}  // namespace acc::graph
