#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/graph/formula.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Fn;
using graph::Formula;

// A formula as a tree in prefix form.
std::string text_of(const Formula& formula, uint32_t at, const std::vector<std::string>& names) {
  const graph::Term& term = formula.terms[at];
  if (term.fn == Fn::kArgument) return names[term.argument];
  if (term.fn == Fn::kConstant) return base::concat(term.constant);
  std::string text = base::concat("(", graph::name_of(term.fn));
  for (int i = 0; i < graph::arity(term.fn); ++i) {
    text += " " + text_of(formula, term.inputs[i], names);
  }
  return text + ")";
}

std::string parsed(const std::string& text) {
  const std::vector<std::string> names{"a", "b", "c"};
  const Formula formula = graph::parse_formula(text, names);
  return text_of(formula, static_cast<uint32_t>(formula.terms.size() - 1), names);
}

TEST(Formula, PrecedenceIsThatOfC) {
  EXPECT_EQ(parsed("a + b * c"), "(add a (mul b c))");
  EXPECT_EQ(parsed("a * b / c"), "(div (mul a b) c)");
  EXPECT_EQ(parsed("a - b - c"), "(sub (sub a b) c)");
  EXPECT_EQ(parsed("-a * b"), "(mul (neg a) b)");
  EXPECT_EQ(parsed("(a + b) * c"), "(mul (add a b) c)");
  EXPECT_EQ(parsed("a < b + c"), "(lt a (add b c))");
  EXPECT_EQ(parsed("(a <= b) | (a >= c) ? 0 : a"), "(select (or (le a b) (ge a c)) 0 a)");
  EXPECT_EQ(parsed("a ? b : b ? c : a"), "(select a b (select b c a))");
  EXPECT_EQ(parsed("!a"), "(not a)");
  EXPECT_EQ(parsed("a != b"), "(ne a b)");
  EXPECT_EQ(parsed("fma(-a, exp(b), 1.5)"), "(fma (neg a) (exp b) 1.5)");
  EXPECT_EQ(parsed("position == a ? sum(b) / count : 0"),
            "(select (eq (position) a) (div (sum b) (count)) 0)");
}

TEST(Formula, KnowsWhatIsATruth) {
  EXPECT_TRUE(graph::parse_formula("a == b", {"a", "b"}).truth());
  EXPECT_TRUE(graph::parse_formula("(a != 0) & (b != 0)", {"a", "b"}).truth());
  EXPECT_FALSE(graph::parse_formula("a & b", {"a", "b"}).truth());
  const Formula choice = graph::parse_formula("a ? b : 0", {"a", "b"});
  EXPECT_TRUE(choice.terms[0].truth);  // a condition keeps its type
  EXPECT_FALSE(choice.truth());
}

TEST(Formula, DefinesNamesGivesSeveralResultsAndWritesArguments) {
  const std::vector<std::string> names{"a", "b", "c"};
  const Formula formula =
      graph::parse_formula("m = sum(a) / c; d = a - m; b = m + b; d * d, amax(d)", names);
  ASSERT_EQ(formula.results.size(), 2U);
  const std::string d = "(sub a (div (sum a) c))";
  EXPECT_EQ(text_of(formula, formula.results[0], names), "(mul " + d + " " + d + ")");
  EXPECT_EQ(text_of(formula, formula.results[1], names), "(amax " + d + ")");
  ASSERT_EQ(formula.writes.size(), 1U);
  EXPECT_EQ(formula.writes[0].argument, 1U);
  EXPECT_EQ(text_of(formula, formula.writes[0].term, names), "(add (div (sum a) c) b)");
}

TEST(Formula, SaysWhatIsWrongAndWhere) {
  const auto message = [](const std::string& text) {
    try {
      graph::parse_formula(text, {"a"});
    } catch (const base::Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message("a + ").find("column 5 of 'a + '"), std::string::npos) << message("a + ");
  EXPECT_NE(message("d").find("no argument"), std::string::npos);
  EXPECT_NE(message("sqrt(a, a)").find("no such function"), std::string::npos);
  EXPECT_NE(message("(a").find("')' was expected"), std::string::npos);
  EXPECT_NE(message("a ? a").find("':' was expected"), std::string::npos);
  EXPECT_NE(message("a a").find("an operator was expected"), std::string::npos);
  EXPECT_NE(message("b = a").find("';' was expected"), std::string::npos);
}

// A node of operator `name`, whose arguments are vectors and numbers.
struct Call {
  testing::GraphBuilder builder;

  explicit Call(const std::string& name, const std::vector<std::string>& arguments) {
    const uint32_t x = builder.input();
    const uint32_t y = builder.fresh();
    builder.call(name, {{x}}, {{y}});
    graph::Op& op = builder.last_op();
    op.arguments.clear();
    for (const std::string& argument : arguments) op.arguments.emplace_back().name = argument;
  }

  // Adds an argument with its words.
  void add(std::initializer_list<int64_t> words) {
    graph::Node& node = builder.graph.nodes[0];
    builder.graph.words.insert(builder.graph.words.begin() + node.outputs, words);
    node.outputs += static_cast<uint32_t>(words.size());
    node.end += static_cast<uint32_t>(words.size());
  }

  const Formula* formula() const {
    return graph::formula_of(builder.graph, builder.graph.nodes[0]);
  }
};

TEST(Formula, AnArgumentMayDecideBetweenFormulas) {
  const auto power = [](int64_t exponent) {
    Call call("aten::pow.Tensor_Scalar", {"self", "exponent"});
    call.add({graph::make_tag(graph::Tag::kInt), exponent});
    const Formula* formula = call.formula();
    return formula == nullptr ? std::string()
                              : text_of(*formula, static_cast<uint32_t>(formula->terms.size() - 1),
                                        {"self", "exponent"});
  };
  EXPECT_EQ(power(2), "(mul self self)");
  EXPECT_EQ(power(-1), "(reciprocal self)");
  EXPECT_EQ(power(7), "(pow self exponent)");
}

TEST(Formula, SeveralGuardsHaveToHold) {
  const auto found = [](bool training, bool weight) {
    Call call("aten::native_batch_norm", {"input", "weight", "bias", "running_mean", "running_var",
                                          "training", "momentum", "eps"});
    const int64_t none = graph::make_tag(graph::Tag::kNone);
    const int64_t truth = graph::make_tag(graph::Tag::kBool);
    if (weight) {
      call.add({graph::make_tag(graph::Tag::kTensor, 6, 0, 1), 0, 0, 4, 1});
    } else {
      call.add({none});
    }
    call.add({none, none, none, truth, training, truth, 0, truth, 0});
    return call.formula();
  };
  ASSERT_NE(found(true, false), nullptr);
  ASSERT_NE(found(false, false), nullptr);
  EXPECT_EQ(found(false, false)->over, "");
  EXPECT_EQ(found(true, false)->over, "but 1");
  EXPECT_NE(found(true, true), found(true, false));
}

TEST(Formula, AnInPlaceFormHasTheFunctionalFormula) {
  EXPECT_NE(Call("aten::exp_", {"self"}).formula(), nullptr);
  EXPECT_EQ(Call("aten::exp_", {"self"}).formula()->terms.back().fn, Fn::kExp);
  EXPECT_EQ(Call("aten::sort", {"self"}).formula(), nullptr);
}

TEST(Formula, TheTableHasNoRowTwiceWithoutAGuard) {
  const std::vector<std::string> names = graph::operators_with_formulas();
  EXPECT_GT(names.size(), 80U);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
}

}  // namespace
}  // namespace acc
