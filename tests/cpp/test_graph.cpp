#include "lazy/graph/graph.h"

#include <gtest/gtest.h>

#include "lazy/graph/print.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Tag;
using testing::GraphBuilder;

TEST(Words, AnItemIsAsLongAsItsPayload) {
  const std::vector<int64_t> list{graph::make_tag(Tag::kList, 0, 0, 2), graph::make_tag(Tag::kInt),
                                  7, graph::make_tag(Tag::kNone)};
  EXPECT_EQ(graph::item_words(list.data()), 4U);
  const std::vector<int64_t> tensor{graph::make_tag(Tag::kTensor, 6, 0, 2), 0, 0, 2, 3, 3, 1};
  EXPECT_EQ(graph::item_words(tensor.data()), 7U);
  const std::vector<int64_t> text{graph::make_tag(Tag::kString, 0, 0, 9), 0, 0};
  EXPECT_EQ(graph::item_words(text.data()), 3U);
}

TEST(Words, AValueHasNoPayloadInTheWordsButAPlaceInTheBlock) {
  const int64_t real = graph::make_tag(Tag::kFloat, 0, graph::kValueFlag);
  EXPECT_EQ(graph::item_words(&real), 1U);
  EXPECT_EQ(graph::item_values(&real), 1U);
  constexpr uint8_t kComplexDouble = 10;
  const int64_t complex = graph::make_tag(Tag::kNumber, kComplexDouble, graph::kValueFlag);
  EXPECT_EQ(graph::item_words(&complex), 1U);
  EXPECT_EQ(graph::item_values(&complex), 2U);
}

TEST(Words, AListOfValuesCountsItsItems) {
  const std::vector<int64_t> list{graph::make_tag(Tag::kList, 0, 0, 2),
                                  graph::make_tag(Tag::kFloat, 0, graph::kValueFlag),
                                  graph::make_tag(Tag::kFloat, 0, graph::kValueFlag)};
  EXPECT_EQ(graph::item_values(list.data()), 2U);
}

GraphBuilder small() {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  b.call("relu", {{x}}, {{y}});
  return b;
}

TEST(Graph, EqualStepsHaveEqualKeys) {
  GraphBuilder a = small();
  graph::Graph copy = a.graph;
  copy.nodes[0].source = 77;  // where it was recorded is not part of the identity
  EXPECT_EQ(graph::hash(a.graph), graph::hash(copy));
  EXPECT_TRUE(graph::same(a.graph, copy));
}

TEST(Graph, WhatChangesAPlanChangesTheKey) {
  GraphBuilder a = small();
  const auto differs = [&](auto change) {
    graph::Graph other = a.graph;
    change(other);
    return !(graph::hash(a.graph) == graph::hash(other)) && !graph::same(a.graph, other);
  };
  EXPECT_TRUE(differs([](graph::Graph& g) { g.words[3] = 5; })) << "a size";
  EXPECT_TRUE(differs([](graph::Graph& g) { g.words[4] = 2; })) << "a stride";
  EXPECT_TRUE(differs([](graph::Graph& g) { g.nodes[0].ambient = 1; })) << "the settings";
  EXPECT_TRUE(differs([](graph::Graph& g) { g.buffers[1].nbytes = 32; })) << "a buffer's size";
  EXPECT_TRUE(differs([](graph::Graph& g) { g.buffers[0].kind = graph::BufferKind::kFresh; }));
  EXPECT_TRUE(differs([](graph::Graph& g) { g.buffers[1].group = 0; })) << "aliasing";
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  b.call("tanh", {{x}}, {{y}});
  EXPECT_TRUE(differs([&](graph::Graph& g) { g.nodes[0].op = b.graph.nodes[0].op; }));
}

TEST(Graph, UsesTellReadsWritesAndByteRanges) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.input();
  b.in_place("add_", {{x, 4, 2}}, {{y, 3}});
  const auto uses = graph::uses(b.graph, b.graph.nodes[0]);
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_TRUE(uses[0].writes && uses[0].reads && !uses[0].fresh);
  EXPECT_EQ(uses[0].first_byte, 8);
  EXPECT_EQ(uses[0].end_byte, 24);
  EXPECT_TRUE(uses[1].reads && !uses[1].writes);
  EXPECT_EQ(uses[1].end_byte, 12);
}

TEST(Graph, ResultsAreFreshWrites) {
  GraphBuilder b = small();
  const auto uses = graph::uses(b.graph, b.graph.nodes[0]);
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_TRUE(uses[1].fresh && uses[1].writes && !uses[1].reads);
}

TEST(Print, OneLinePerNode) {
  GraphBuilder b = small();
  b.in_place("mul_", {{0, 2, 1}}, {{1}});
  EXPECT_EQ(graph::print(b.graph),
            "%1:f32[4] = relu(%0:f32[4])\n"
            "mul_(%0:f32[2]+1, %1:f32[4])\n");
}

}  // namespace
}  // namespace acc
