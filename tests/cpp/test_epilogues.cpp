// Products take over what stands behind them where one call does both, and nowhere else.
#include "lazy/passes/epilogues.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/cpp/product_builder.h"

namespace acc {
namespace {

using graph::Tag;
using testing::Matrix;
using Lines = std::vector<std::string>;

constexpr int64_t kRows = 4;
constexpr int64_t kTerms = 3;
constexpr int64_t kColumns = 8;

struct Program : testing::ProductBuilder {
  graph::Op relu, gelu, gelu_backward, sum, other;
  graph::Op with_relu, with_gelu, with_gelu_backward, with_sum;

  Program() {
    const auto name = [](graph::Op* op, const char* text, size_t arguments, size_t results = 1) {
      op->name = text;
      op->arguments.resize(arguments);
      op->returns.resize(results);
    };
    name(&relu, "aten::relu", 1);
    name(&gelu, "aten::gelu", 2);
    name(&gelu_backward, "aten::gelu_backward", 3);
    name(&sum, "aten::sum.dim_IntList", 4);
    name(&other, "other", 1);
    name(&with_relu, "relu", 6);
    name(&with_gelu, "gelu", 3, 2);
    name(&with_gelu_backward, "backward", 3);
    name(&with_sum, "sum", 3, 2);
    addmm.with_relu = &with_relu;
    addmm.with_gelu = &with_gelu;
    mm.with_gelu_backward = &with_gelu_backward;
    mm.with_sum = &with_sum;
  }

  Matrix left{input(), kRows, kTerms};
  Matrix right{input(), kTerms, kColumns};
  std::vector<bool> outputs;

  static std::vector<int64_t> word(const Matrix& m) {
    return {graph::make_tag(Tag::kTensor, m.dtype, 0, 2),
            m.buffer,
            0,
            m.rows,
            m.columns,
            m.strides[0],
            m.strides[1]};
  }
  static std::vector<int64_t> text(const char* letters) {
    int64_t packed = 0;
    std::memcpy(&packed, letters, std::strlen(letters));
    return {graph::make_tag(Tag::kString, 0, 0, std::strlen(letters)), packed};
  }
  Matrix made(int64_t rows, int64_t columns, uint8_t dtype = graph::dtype::kF32) {
    const auto bytes = static_cast<uint64_t>(rows * columns) * graph::element_bytes(dtype);
    return {fresh(bytes), rows, columns, {columns, 1}, dtype};
  }
  void put(const graph::Op& op, const std::vector<std::vector<int64_t>>& arguments,
           const std::vector<std::vector<int64_t>>& results) {
    graph::Node node;
    node.op = &op;
    const auto end = [&] { return static_cast<uint32_t>(graph.words.size()); };
    node.words = end();
    for (const auto& item : arguments) {
      graph.words.insert(graph.words.end(), item.begin(), item.end());
    }
    node.outputs = end();
    for (const auto& item : results) {
      graph.words.insert(graph.words.end(), item.begin(), item.end());
    }
    node.end = end();
    graph.nodes.push_back(node);
  }
  Matrix layer(int64_t alpha = 1) {
    const uint32_t result = multiply(left, right, input(), alpha);
    return {result, left.rows, right.columns, {right.columns, 1}, left.dtype};
  }
  Matrix put_relu(const Matrix& of) {
    const Matrix result = made(of.rows, of.columns, of.dtype);
    put(relu, {word(of)}, {word(result)});
    return result;
  }
  Matrix put_gelu(const Matrix& of, const char* how = "tanh") {
    const Matrix result = made(of.rows, of.columns, of.dtype);
    put(gelu, {word(of), text(how)}, {word(result)});
    return result;
  }
  void read(const Matrix& m) { put(other, {word(m)}, {word(made(1, 1))}); }
  void write(uint32_t buffer) { in_place("write", {{buffer, 1}}); }

  Lines names() {
    outputs.resize(graph.buffers.size());
    for (size_t i = 0; i < graph.buffers.size(); ++i) graph.buffers[i].written = true;
    const graph::Graph joined = passes::join_epilogues(graph, outputs);
    Lines found;
    for (const graph::Node& node : joined.nodes) found.push_back(node.op->name);
    return found;
  }
  Lines lines() {
    outputs.resize(graph.buffers.size());
    return testing::lines_of(passes::join_epilogues(graph, outputs));
  }
};

TEST(Epilogues, AReluOfALayer) {
  Program p;
  p.put_relu(p.layer());
  EXPECT_EQ(p.lines(), (Lines{"%4:f32[4,8] = relu(%2:f32[8], %0:f32[4,3], %1:f32[3,8], 1, 1, "
                              "False)"}));
}

TEST(Epilogues, AGeluOfALayerKeepsWhatItIsOf) {
  Program p;
  const Matrix before = p.layer();
  p.put_gelu(before);
  p.read(before);
  EXPECT_EQ(p.lines()[0], "%4:f32[4,8], %3:f32[4,8] = gelu(%2:f32[8], %0:f32[4,3], %1:f32[3,8])");
  EXPECT_EQ(p.lines().size(), 2U);
}

TEST(Epilogues, TheBackwardOfAGeluGoesToTheProductBeforeIt) {
  Program p;
  const Matrix before = p.made(kRows, kColumns);
  p.put(p.other, {Program::word(p.left)}, {Program::word(before)});
  const uint32_t made = p.multiply(p.left, p.right);
  const Matrix gradient{made, kRows, kColumns};
  const Matrix after = p.made(kRows, kColumns);
  p.put(p.gelu_backward, {Program::word(gradient), Program::word(before), Program::text("tanh")},
        {Program::word(after)});
  EXPECT_EQ(p.lines()[1], "%4:f32[4,8] = backward(%0:f32[4,3], %1:f32[3,8], %2:f32[4,8])");
}

// The gradient of a weight, gradient^T @ input, and that of the bias, in either order.
struct BiasGradient : Program {
  Matrix gradient{input(), kRows, kColumns};
  Matrix rows{input(), kRows, kTerms};
  Matrix total = made(1, kColumns);

  void put_product() { multiply({gradient.buffer, kColumns, kRows, {1, kColumns}}, rows); }
  void put_sum(int64_t dimension = 0) {
    put(sum,
        {word(gradient),
         {graph::make_tag(Tag::kList, 0, 0, 1), graph::make_tag(Tag::kInt), dimension},
         {graph::make_tag(Tag::kBool), 1},
         {graph::make_tag(Tag::kNone)}},
        {word(total)});
  }
};

TEST(Epilogues, ASumGoesToTheProductOfTheSame) {
  for (const bool sum_first : {false, true}) {
    BiasGradient p;
    if (sum_first) p.put_sum();
    p.put_product();
    if (!sum_first) p.put_sum();
    EXPECT_EQ(p.lines(), (Lines{"%5:f32[8,3], %4:f32[1,8] = sum(%2:f32[8,4]/[1,8], %3:f32[4,3], "
                                "True)"}));
  }
}

TEST(Epilogues, ASumOfOtherDimensionsStays) {
  BiasGradient p;
  p.put_product();
  p.put_sum(1);
  EXPECT_EQ(p.names(), (Lines{"mm", "aten::sum.dim_IntList"}));
}

TEST(Epilogues, ASumThatSomebodyReadsBeforeTheProductStays) {
  BiasGradient p;
  p.put_sum();
  p.read(p.total);
  p.put_product();
  EXPECT_EQ(p.names(), (Lines{"aten::sum.dim_IntList", "other", "mm"}));
}

TEST(Epilogues, OfAGradientThatChangesInBetweenTheyStay) {
  BiasGradient p;
  p.put_product();
  p.write(p.gradient.buffer);
  p.put_sum();
  EXPECT_EQ(p.names(), (Lines{"mm", "write", "aten::sum.dim_IntList"}));
}

TEST(Epilogues, OfOneSumAndTwoProductsOneTakesIt) {
  BiasGradient p;
  p.put_product();
  p.put_product();
  p.put_sum();
  const Lines names = p.names();
  EXPECT_EQ(names, (Lines{"mm", "sum"}));
}

TEST(Epilogues, AReluWhoseInputIsSeenStays) {
  Program read;
  const Matrix before = read.layer();
  read.put_relu(before);
  read.read(before);
  EXPECT_EQ(read.names(), (Lines{"addmm", "aten::relu", "other"}));

  Program kept;
  const Matrix result = kept.layer();
  kept.put_relu(result);
  kept.outputs.resize(kept.graph.buffers.size());
  kept.outputs[result.buffer] = true;
  EXPECT_EQ(kept.names(), (Lines{"addmm", "aten::relu"}));
}

TEST(Epilogues, OfAResultThatChangesItStays) {
  Program p;
  const Matrix before = p.layer();
  p.write(before.buffer);
  p.put_gelu(before);
  EXPECT_EQ(p.names(), (Lines{"addmm", "write", "aten::gelu"}));
}

TEST(Epilogues, AnotherGeluStays) {
  Program p;
  p.put_gelu(p.layer(), "none");
  EXPECT_EQ(p.names(), (Lines{"addmm", "aten::gelu"}));
}

TEST(Epilogues, FactorsStay) {
  Program p;
  p.put_relu(p.layer(/*alpha=*/2));
  EXPECT_EQ(p.names(), (Lines{"addmm", "aten::relu"}));
}

TEST(Epilogues, DoublesStayAndHalvesGo) {
  for (const uint8_t dtype : {graph::dtype::kF64, graph::dtype::kF16}) {
    Program p;
    p.left.dtype = p.right.dtype = dtype;
    p.put_relu(p.layer());
    EXPECT_EQ(p.names().size(), dtype == graph::dtype::kF64 ? 2U : 1U);
  }
}

TEST(Epilogues, TheBackwardStaysWhereWhatItReadsIsMadeLater) {
  Program p;
  const Matrix before = p.made(kRows, kColumns);
  const uint32_t made = p.multiply(p.left, p.right);
  p.put(p.other, {Program::word(p.left)}, {Program::word(before)});
  p.put(p.gelu_backward,
        {Program::word({made, kRows, kColumns}), Program::word(before), Program::text("tanh")},
        {Program::word(p.made(kRows, kColumns))});
  EXPECT_EQ(p.names(), (Lines{"mm", "other", "aten::gelu_backward"}));
}

TEST(Epilogues, TheBackwardStaysWhereWhatItReadsWaitsForASum) {
  BiasGradient p;
  p.put_product();  // (8, 3)
  const Matrix waits{static_cast<uint32_t>(p.graph.buffers.size() - 1), kColumns, kTerms};
  const Matrix left{p.input(), kColumns, 2};
  const Matrix right{p.input(), 2, kTerms};
  const uint32_t made = p.multiply(left, right);
  p.put_sum();
  p.put(p.gelu_backward,
        {Program::word({made, kColumns, kTerms}), Program::word(waits), Program::text("tanh")},
        {Program::word(p.made(kColumns, kTerms))});
  EXPECT_EQ(p.names(), (Lines{"mm", "sum", "aten::gelu_backward"}));
}

// The memory of one half type, read as another.
Matrix as_brain(Matrix m) {
  m.dtype = graph::dtype::kBF16;
  return m;
}

TEST(Epilogues, WhatIsReadAsAnotherTypeStays) {
  Program p;
  p.left.dtype = p.right.dtype = graph::dtype::kF16;
  p.put_relu(as_brain(p.layer()));
  p.put_gelu(as_brain(p.layer()));
  EXPECT_EQ(p.names(), (Lines{"addmm", "aten::relu", "addmm", "aten::gelu"}));
}

TEST(Epilogues, TheBackwardOfAGeluReadAsAnotherTypeStays) {
  Program p;
  p.left.dtype = p.right.dtype = graph::dtype::kF16;
  const Matrix before = p.made(kRows, kColumns, graph::dtype::kBF16);
  p.put(p.other, {Program::word(p.left)}, {Program::word(before)});
  const uint32_t made = p.multiply(p.left, p.right);
  const Matrix gradient = as_brain({made, kRows, kColumns});
  const Matrix after = p.made(kRows, kColumns, graph::dtype::kBF16);
  p.put(p.gelu_backward, {Program::word(gradient), Program::word(before), Program::text("tanh")},
        {Program::word(after)});
  EXPECT_EQ(p.names(), (Lines{"other", "mm", "aten::gelu_backward"}));
}

TEST(Epilogues, WhatIsWrittenInPlaceIsNoProduct) {
  Program p;
  const Matrix made = p.made(kRows, kColumns);
  p.write(made.buffer);
  p.put_relu(made);
  EXPECT_EQ(p.names(), (Lines{"write", "aten::relu"}));
}

TEST(Epilogues, OperandsOfOneDimensionAreNoLayer) {
  Program p;
  const uint32_t vector = p.input();
  const auto word = [](uint32_t buffer, int64_t size) {
    return std::vector<int64_t>{graph::make_tag(Tag::kTensor, graph::dtype::kF32, 0, 1), buffer, 0,
                                size, 1};
  };
  graph::Op addr = p.addmm;
  addr.name = "addr";
  const Matrix made = p.made(kColumns, kColumns);
  const std::vector<int64_t> one = {graph::make_tag(Tag::kInt), 1};
  p.put(addr, {word(vector, kColumns), word(vector, kColumns), word(vector, kColumns), one, one},
        {Program::word(made)});
  p.put_relu(made);
  EXPECT_EQ(p.names(), (Lines{"addr", "aten::relu"}));
}

}  // namespace
}  // namespace acc
