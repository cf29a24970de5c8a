// What surrounds a product joins its call, and nothing else does.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <deque>

#include "lazy/passes/epilogues.h"
#include "tests/cpp/product_builder.h"

namespace acc {
namespace {

using graph::Tag;
using testing::Matrix;
using Lines = std::vector<std::string>;

constexpr int64_t kRows = 6;
constexpr int64_t kTerms = 16;
constexpr int64_t kColumns = 128;
constexpr uint64_t kBytes = kRows * kColumns * 4;

struct Program : testing::ProductBuilder {
  graph::Op activation;
  graph::Op backward;
  graph::Op bias_gradient;
  std::deque<graph::Op> others;

  Program() {
    activation.name = "addmm_activation";
    backward.name = "mm_activation_backward";
    bias_gradient.name = "mm_bias_gradient";
    for (graph::Op* op : {&activation, &backward, &bias_gradient}) {
      op->arguments.resize(5);
      op->returns.resize(2);
    }
    mm.epilogues = addmm.epilogues = {&activation, &backward, &bias_gradient};
  }

  static std::vector<int64_t> tensor(const Matrix& m) {
    return {graph::make_tag(Tag::kTensor, m.dtype, 0, 2),
            m.buffer,
            0,
            m.rows,
            m.columns,
            m.strides[0],
            m.strides[1]};
  }
  static std::vector<int64_t> text(const char* letters) {
    int64_t word = 0;
    std::memcpy(&word, letters, 4);
    return {graph::make_tag(Tag::kString, 0, 0, 4), word};
  }
  static std::vector<int64_t> number(double value) {
    return {graph::make_tag(Tag::kFloat), std::bit_cast<int64_t>(value)};
  }

  // Appends a call of `name`. One without a result writes its first argument, but for "read".
  void call(const char* name, std::initializer_list<std::vector<int64_t>> arguments,
            const std::vector<int64_t>& result) {
    graph::Op& op = others.emplace_back();
    op.name = name;
    for (const char* argument : {"grad_output", "self", "threshold", "dtype"}) {
      if (op.arguments.size() < arguments.size()) op.arguments.push_back({.name = argument});
    }
    op.writes = result.empty() && op.name != "read";
    if (op.writes) op.arguments[0].writes = true;
    if (!result.empty()) op.returns = {{}};
    graph::Node node;
    node.op = &op;
    node.words = static_cast<uint32_t>(graph.words.size());
    for (const auto& words : arguments) {
      graph.words.insert(graph.words.end(), words.begin(), words.end());
    }
    node.outputs = static_cast<uint32_t>(graph.words.size());
    graph.words.insert(graph.words.end(), result.begin(), result.end());
    node.end = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
  }
  Matrix matrix() { return {fresh(kBytes), kRows, kColumns}; }

  // x @ w + bias
  Matrix forward() {
    const uint32_t x = input();
    const uint32_t w = input();
    return {multiply({x, kRows, kTerms}, {w, kTerms, kColumns}, input()), kRows, kColumns};
  }
  // The gradient of the next layer's result, times its weight.
  Matrix outer() {
    const uint32_t x = input();
    return {multiply({x, kRows, kTerms}, {input(), kTerms, kColumns}), kRows, kColumns};
  }
  Matrix relu(const Matrix& of) {
    const Matrix made = matrix();
    call("aten::relu", {tensor(of)}, tensor(made));
    return made;
  }
  void next_layer(const Matrix& of) { call("read", {tensor(of)}, {}); }
  Matrix gelu(const Matrix& of, const char* kind = "tanh") {
    const Matrix made = matrix();
    call("aten::gelu", {tensor(of), text(kind)}, tensor(made));
    return made;
  }
  Matrix relu_backward(const Matrix& gradient, const Matrix& result, double threshold = 0) {
    const Matrix made = matrix();
    call("aten::threshold_backward", {tensor(gradient), tensor(result), number(threshold)},
         tensor(made));
    return made;
  }
  Matrix gelu_backward(const Matrix& gradient, const Matrix& of) {
    const Matrix made = matrix();
    call("aten::gelu_backward", {tensor(gradient), tensor(of), text("tanh")}, tensor(made));
    return made;
  }
  uint32_t sum(const Matrix& of, int64_t dim = 0) {
    const int64_t left = dim == 0 ? of.columns : of.rows;
    const uint32_t made = fresh(static_cast<uint64_t>(left) * 4);
    call("aten::sum.dim_IntList",
         {tensor(of),
          {graph::make_tag(Tag::kList, 0, 0, 1), graph::make_tag(Tag::kInt), dim},
          {graph::make_tag(Tag::kBool), 0},
          {graph::make_tag(Tag::kNone)}},
         {graph::make_tag(Tag::kTensor, graph::dtype::kF32, 0, 1), made, 0, left, 1});
    return made;
  }

  Lines names(std::initializer_list<uint32_t> outputs = {}) const {
    Lines found;
    for (const graph::Node& node : passes::join_epilogues(graph, alive(outputs)).nodes) {
      found.push_back(node.op->name);
    }
    return found;
  }
  Lines lines(std::initializer_list<uint32_t> outputs = {}) const {
    return testing::lines_of(passes::join_epilogues(graph, alive(outputs)));
  }
};

TEST(Epilogues, GeluLeavesWhatNobodyReads) {
  Program p;
  p.gelu(p.forward());
  EXPECT_EQ(p.lines(), (Lines{"%4:f32[6,128], undefined = addmm_activation(%2:f32[128], "
                              "%0:f32[6,16], %1:f32[16,128], True, False)"}));
}

TEST(Epilogues, GeluKeepsItsInputForOthers) {
  for (const bool output : {false, true}) {
    Program p;
    const Matrix made = p.forward();
    p.gelu(made);
    if (!output) p.next_layer(made);
    const Lines lines = output ? p.lines({made.buffer}) : p.lines();
    EXPECT_EQ(lines[0],
              "%4:f32[6,128], %3:f32[6,128] = addmm_activation(%2:f32[128], "
              "%0:f32[6,16], %1:f32[16,128], True, True)");
  }
}

TEST(Epilogues, OtherKindsOfGeluStay) {
  Program p;
  p.gelu(p.forward(), "none");
  EXPECT_EQ(p.names(), (Lines{"addmm", "aten::gelu"}));
}

TEST(Epilogues, ReluLeavesBitsForItsBackward) {
  Program p;
  const Matrix made = p.relu(p.forward());
  p.next_layer(made);
  p.relu_backward(p.outer(), made);
  EXPECT_EQ(p.lines(),
            (Lines{"%4:f32[6,128], %9:u8[6,16] = addmm_activation(%2:f32[128], %0:f32[6,16], "
                   "%1:f32[16,128], False, True)",
                   "read(%4:f32[6,128])",
                   "%8:f32[6,128], undefined = mm_activation_backward(%5:f32[6,16], "
                   "%6:f32[16,128], %9:u8[6,16], False, False)"}));
}

TEST(Epilogues, ReluInPlaceAsWell) {
  Program p;
  const Matrix made = p.forward();
  p.call("aten::relu_", {Program::tensor(made)}, {});
  EXPECT_EQ(p.names({made.buffer}), (Lines{"addmm_activation"}));
}

TEST(Epilogues, ReluWhoseInputIsSeenStays) {
  Program p;
  const Matrix made = p.forward();
  p.relu(made);
  EXPECT_EQ(p.names({made.buffer}), (Lines{"addmm", "aten::relu"}));
}

TEST(Epilogues, WhatReluMadeIsChangedBeforeItsBackward) {
  Program p;
  const Matrix made = p.relu(p.forward());
  p.call("write", {Program::tensor(made)}, {});
  p.relu_backward(p.outer(), made);
  EXPECT_EQ(p.names(), (Lines{"addmm_activation", "write", "mm", "aten::threshold_backward"}));
}

TEST(Epilogues, OtherThresholdsStay) {
  Program p;
  const Matrix made = p.relu(p.forward());
  p.next_layer(made);
  p.relu_backward(p.outer(), made, 0.5);
  EXPECT_EQ(p.names(), (Lines{"addmm_activation", "read", "mm", "aten::threshold_backward"}));
}

TEST(Epilogues, TheBackwardSumsUpItsRows) {
  Program p;
  const Matrix of{p.input(), kRows, kColumns};
  const Matrix made = p.gelu_backward(p.outer(), of);
  const uint32_t bias = p.sum(made);
  EXPECT_EQ(p.lines({bias}),
            (Lines{"%4:f32[6,128], %5:f32[128] = mm_activation_backward(%1:f32[6,16], "
                   "%2:f32[16,128], %0:f32[6,128], True, True)"}));
}

TEST(Epilogues, OtherSumsStay) {
  Program p;
  const Matrix made = p.gelu_backward(p.outer(), {p.input(), kRows, kColumns});
  p.sum(made, 1);
  EXPECT_EQ(p.names(), (Lines{"mm_activation_backward", "aten::sum.dim_IntList"}));
}

TEST(Epilogues, GradientsThatAreSeenStay) {
  Program p;
  const Matrix outer = p.outer();
  p.gelu_backward(outer, {p.input(), kRows, kColumns});
  EXPECT_EQ(p.names({outer.buffer}), (Lines{"mm", "aten::gelu_backward"}));
}

TEST(Epilogues, OperandsThatChangeBeforeTheBackwardStay) {
  Program p;
  const Matrix left{p.input(), kRows, kTerms};
  const Matrix outer{p.multiply(left, {p.input(), kTerms, kColumns}), kRows, kColumns};
  p.call("write", {Program::tensor(left)}, {});
  p.gelu_backward(outer, {p.input(), kRows, kColumns});
  EXPECT_EQ(p.names(), (Lines{"mm", "write", "aten::gelu_backward"}));
}

// The gradient of a weight, and of a bias: `gradient` is transposed on the left, or on the right.
Lines gradients(bool left, bool sum_first, bool used_between = false) {
  Program p;
  const Matrix gradient = p.matrix();
  p.call("made", {Program::number(1)}, Program::tensor(gradient));
  const Matrix x{p.input(), kRows, kTerms};
  uint32_t sum = 0;
  if (sum_first) sum = p.sum(gradient);
  if (used_between) {
    p.call("read", {{graph::make_tag(Tag::kTensor, graph::dtype::kF32, 0, 1), sum, 0, kColumns, 1}},
           {});
  }
  if (left) {
    p.multiply({gradient.buffer, kColumns, kRows, {1, kColumns}}, x);
  } else {
    p.multiply({x.buffer, kTerms, kRows, {1, kTerms}}, gradient);
  }
  if (!sum_first) p.sum(gradient);
  return p.names();
}

TEST(Epilogues, GradientsOfWeightsAndBiasesAreOneCall) {
  for (const bool left : {true, false}) {
    for (const bool sum_first : {true, false}) {
      EXPECT_EQ(gradients(left, sum_first), (Lines{"made", "mm_bias_gradient"}));
    }
  }
}

TEST(Epilogues, ASumThatIsUsedBeforeTheProductStays) {
  EXPECT_EQ(gradients(true, true, true), (Lines{"made", "aten::sum.dim_IntList", "read", "mm"}));
}

TEST(Epilogues, SumsOfWhatKernelsMakeStay) {
  Program p;
  const Matrix from{p.input(), kRows, kColumns};
  const Matrix gradient = p.matrix();
  p.call("aten::neg", {Program::tensor(from)}, Program::tensor(gradient));
  p.others.back().arguments[0].name = "self";  // of its formula
  p.sum(gradient);
  p.multiply({gradient.buffer, kColumns, kRows, {1, kColumns}}, {p.input(), kRows, kTerms});
  EXPECT_EQ(p.names(), (Lines{"aten::neg", "aten::sum.dim_IntList", "mm"}));
}

TEST(Epilogues, OtherTypesStay) {
  Program p;
  p.multiply({p.input(), kRows, kTerms, {kTerms, 1}, graph::dtype::kF64},
             {p.input(), kTerms, kColumns, {kColumns, 1}, graph::dtype::kF64});
  const Matrix outer{
      p.graph.nodes.size() > 0 ? 2U : 0U, kRows, kColumns, {kColumns, 1}, graph::dtype::kF64};
  Matrix made{p.fresh(2 * kBytes), kRows, kColumns, {kColumns, 1}, graph::dtype::kF64};
  p.call("aten::gelu_backward",
         {Program::tensor(outer), Program::tensor(outer), Program::text("tanh")},
         Program::tensor(made));
  EXPECT_EQ(p.names(), (Lines{"mm", "aten::gelu_backward"}));
}

TEST(Epilogues, FactorsStay) {
  Program p;
  const uint32_t made =
      p.multiply({p.input(), kRows, kTerms}, {p.input(), kTerms, kColumns}, p.input(), /*alpha=*/2);
  p.gelu({made, kRows, kColumns});
  EXPECT_EQ(p.names(), (Lines{"addmm", "aten::gelu"}));
}

TEST(Epilogues, TheSettingsAreThoseOfTheProduct) {
  Program p;
  p.gelu(p.forward());
  p.graph.nodes[0].ambient = 5;
  EXPECT_EQ(passes::join_epilogues(p.graph, p.alive({})).nodes[0].ambient, 5U);
}

}  // namespace
}  // namespace acc
