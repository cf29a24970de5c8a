#pragma once

#include <optional>

#include "tests/cpp/graph_builder.h"

// Builds graphs with products of matrices by hand.
namespace acc::testing {

// A matrix of floats from the beginning of a buffer; its rows lie one behind the other unless
// `strides` say otherwise.
struct Matrix {
  uint32_t buffer;
  int64_t rows;
  int64_t columns;
  std::array<int64_t, 2> strides{columns, 1};
  uint8_t dtype = graph::dtype::kF32;
};

struct ProductBuilder : GraphBuilder {
  graph::Op mm;
  graph::Op addmm;

  ProductBuilder() {
    mm.name = "mm";
    mm.id = 1;
    mm.arguments = {{.name = "self"}, {.name = "mat2"}};
    addmm.name = "addmm";
    addmm.id = 2;
    addmm.arguments = {
        {.name = "self"}, {.name = "mat1"}, {.name = "mat2"}, {.name = "beta"}, {.name = "alpha"}};
    for (graph::Op* op : {&mm, &addmm}) op->returns = {{}};
  }

  // left @ right, plus a row where there is a bias, in a new buffer.
  uint32_t multiply(const Matrix& left, const Matrix& right,
                    std::optional<uint32_t> bias = std::nullopt, int64_t alpha = 1) {
    const Matrix made{
        fresh(static_cast<uint64_t>(left.rows * right.columns) * graph::element_bytes(left.dtype)),
        left.rows,
        right.columns,
        {right.columns, 1},
        left.dtype};
    graph::Node node;
    node.op = bias.has_value() ? &addmm : &mm;
    node.words = static_cast<uint32_t>(graph.words.size());
    if (bias.has_value()) {
      words({graph::make_tag(graph::Tag::kTensor, left.dtype, 0, 1), *bias, 0, right.columns, 1});
    }
    push(left);
    push(right);
    if (bias.has_value()) {
      words({graph::make_tag(graph::Tag::kInt), 1, graph::make_tag(graph::Tag::kInt), alpha});
    }
    node.outputs = static_cast<uint32_t>(graph.words.size());
    push(made);
    node.end = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
    return made.buffer;
  }

 private:
  void words(std::initializer_list<int64_t> more) { graph.words.insert(graph.words.end(), more); }
  void push(const Matrix& m) {
    words({graph::make_tag(graph::Tag::kTensor, m.dtype, 0, 2), m.buffer, 0, m.rows, m.columns,
           m.strides[0], m.strides[1]});
  }
};

}  // namespace acc::testing
