#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/graph/print.h"
#include "lazy/graph/words.h"
#include "lazy/passes/lists.h"

namespace acc {
namespace {

constexpr int64_t kElements = 100;
constexpr uint8_t kFloat = 6;

// Calls on lists of vectors, built by hand.
struct Lists {
  graph::Graph graph;
  graph::Op sqrt, add, sqrt_list, add_list, relu;

  Lists() {
    sqrt.name = "sqrt";
    sqrt.arguments.resize(1);
    sqrt.returns.resize(1);
    add.name = "add_";
    add.arguments.resize(3);
    add.arguments[0].writes = true;
    add.returns.push_back({0, false});
    relu = sqrt;
    relu.name = "relu";
    sqrt_list = sqrt;
    sqrt_list.name = "_foreach_sqrt";
    sqrt_list.item = &sqrt;
    sqrt_list.item_arguments = {{0, {}}};
    add_list = add;
    add_list.name = "_foreach_add_";
    add_list.arguments.resize(2);
    add_list.item = &add;
    add_list.item_arguments = {{0, {}}, {1, {}}, {-1, {graph::make_tag(graph::Tag::kInt), 1}}};
  }

  std::vector<uint32_t> buffers(size_t n, graph::BufferKind kind = graph::BufferKind::kInput) {
    std::vector<uint32_t> made;
    for (size_t i = 0; i < n; ++i) {
      made.push_back(static_cast<uint32_t>(graph.buffers.size()));
      graph.buffers.push_back({kind, 4 * kElements, made.back(), 0, false});
    }
    return made;
  }

  void begin(const graph::Op& op) {
    graph::Node node;
    node.op = &op;
    node.words = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
  }
  void list(const std::vector<uint32_t>& buffers, int64_t elements = kElements) {
    graph.words.push_back(graph::make_tag(graph::Tag::kList, 0, 0, buffers.size()));
    for (const uint32_t buffer : buffers) one(buffer, elements);
  }
  void one(uint32_t buffer, int64_t elements = kElements, int64_t offset = 0) {
    for (const int64_t word : {graph::make_tag(graph::Tag::kTensor, kFloat, 0, 1),
                               static_cast<int64_t>(buffer), offset, elements, int64_t{1}}) {
      graph.words.push_back(word);
    }
  }
  void values(uint32_t n) {
    graph.words.push_back(graph::make_tag(graph::Tag::kList, 0, 0, n));
    for (uint32_t i = 0; i < n; ++i) {
      graph.words.push_back(graph::make_tag(graph::Tag::kFloat, 0, graph::kValueFlag));
    }
    graph.nodes.back().n_values = n;
  }
  void results() { graph.nodes.back().outputs = static_cast<uint32_t>(graph.words.size()); }
  void end() { graph.nodes.back().end = static_cast<uint32_t>(graph.words.size()); }

  void sqrt_of(const std::vector<uint32_t>& from, const std::vector<uint32_t>& to,
               int64_t elements = kElements) {
    begin(sqrt_list);
    list(from, elements);
    results();
    list(to, elements);
    end();
  }
  void add_to(const std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
    begin(add_list);
    list(to);
    list(from);
    results();
    end();
  }

  std::vector<std::string> lowered() const {
    return lines(
        passes::run_lists_by_item(graph, std::vector<bool>(graph.nodes.size(), true), true));
  }

  // The text of a graph, in which all tensors have the same geometry.
  static std::vector<std::string> lines(const graph::Graph& graph) {
    std::vector<std::string> lines;
    std::string text = graph::print(graph);
    for (size_t at = 0; at < text.size();) {
      const size_t stop = text.find('\n', at);
      std::string line = text.substr(at, stop - at);
      const std::string geometry = ":f32[" + std::to_string(kElements) + "]";
      for (size_t i = line.find(geometry); i != std::string::npos; i = line.find(geometry)) {
        line.erase(i, geometry.size());
      }
      lines.push_back(line);
      at = stop + 1;
    }
    return lines;
  }
};

TEST(Lists, NeighboursRunItemByItem) {
  Lists b;
  const auto x = b.buffers(2);
  const auto y = b.buffers(2);
  const auto root = b.buffers(2, graph::BufferKind::kFresh);
  b.sqrt_of(x, root);
  b.add_to(y, root);
  EXPECT_EQ(Lists::lines(b.graph), (std::vector<std::string>{"[%4, %5] = _foreach_sqrt([%0, %1])",
                                                             "_foreach_add_([%2, %3], [%4, %5])"}));
  EXPECT_EQ(b.lowered(), (std::vector<std::string>{"%4 = sqrt(%0)", "add_(%2, %4, 1)",
                                                   "%5 = sqrt(%1)", "add_(%3, %5, 1)"}));
}

TEST(Lists, ItemsThatMeetKeepTheOrderOfTheCalls) {
  // The second call adds the neighbour's root: all roots must be there.
  Lists b;
  const auto x = b.buffers(2);
  const auto y = b.buffers(2);
  const auto root = b.buffers(2, graph::BufferKind::kFresh);
  b.sqrt_of(x, root);
  b.add_to(y, {root[1], root[0]});
  EXPECT_EQ(b.lowered(), (std::vector<std::string>{"%4 = sqrt(%0)", "%5 = sqrt(%1)",
                                                   "add_(%2, %5, 1)", "add_(%3, %4, 1)"}));
}

TEST(Lists, ACallThatWritesOneTensorTwiceStaysWhole) {
  Lists b;
  const auto x = b.buffers(2);
  const auto y = b.buffers(1);
  b.add_to({y[0], y[0]}, x);
  EXPECT_EQ(b.lowered(), (std::vector<std::string>{"_foreach_add_([%2, %2], [%0, %1])"}));
}

// One buffer, in which all gradients are views.
TEST(Lists, ViewsOfOneBufferThatDoNotMeetRunItemByItem) {
  for (const int64_t step : {kElements, kElements - 1}) {
    Lists b;
    const auto x = b.buffers(2);
    const auto y = b.buffers(1);
    b.graph.buffers[y[0]].nbytes = 8 * kElements;
    b.graph.buffers[y[0]].written = true;
    for (int call = 0; call < 2; ++call) {
      b.begin(b.add_list);
      b.graph.words.push_back(graph::make_tag(graph::Tag::kList, 0, 0, 2));
      b.one(y[0], kElements, 0);
      b.one(y[0], kElements, step);
      b.list(x);
      b.results();
      b.end();
    }
    if (step == kElements) {
      EXPECT_EQ(b.lowered(),
                (std::vector<std::string>{"add_(%2, %0, 1)", "add_(%2, %0, 1)",
                                          "add_(%2+100, %1, 1)", "add_(%2+100, %1, 1)"}));
    } else {
      EXPECT_EQ(b.lowered().size(), 2U);
    }
  }
}

TEST(Lists, AnotherCallBetweenThemSeparates) {
  Lists b;
  const auto x = b.buffers(2);
  const auto y = b.buffers(2);
  const auto root = b.buffers(3, graph::BufferKind::kFresh);
  b.sqrt_of(x, {root[0], root[1]});
  b.begin(b.relu);
  b.one(root[1]);
  b.results();
  b.one(root[2]);
  b.end();
  b.add_to(y, {root[0], root[1]});
  EXPECT_EQ(b.lowered(),
            (std::vector<std::string>{"%4 = sqrt(%0)", "%5 = sqrt(%1)", "%6 = relu(%5)",
                                      "add_(%2, %4, 1)", "add_(%3, %5, 1)"}));
}

TEST(Lists, EachItemTakesItsOwnNumber) {
  Lists b;
  graph::Op scale;
  scale.name = "mul_";
  scale.arguments.resize(2);
  scale.arguments[0].writes = true;
  graph::Op scale_list = scale;
  scale_list.name = "_foreach_mul_";
  scale_list.item = &scale;
  scale_list.item_arguments = {{0, {}}, {1, {}}};
  const auto x = b.buffers(3);
  b.begin(scale_list);
  b.list(x);
  b.values(3);
  b.graph.nodes.back().values = 7;
  b.results();
  b.end();
  scale_list.item_with_number = &scale;
  const graph::Graph out = passes::run_lists_by_item(b.graph, {true}, /*split=*/true);
  ASSERT_EQ(out.nodes.size(), 3U);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(out.nodes[i].values, 7 + i);
    EXPECT_EQ(out.nodes[i].n_values, 1U);
    EXPECT_EQ(graph::uses(out, out.nodes[i]).size(), 1U);
    const int64_t number = out.words[out.nodes[i].outputs - 1];
    EXPECT_EQ(graph::tag_of(number), graph::Tag::kNumber);
    EXPECT_EQ(graph::flags_of(number), graph::kValueFlag | graph::kWrappedFlag);
  }
}

TEST(Lists, DefaultsMayStandBetweenWhatIsGiven) {
  Lists b;
  graph::Op norm;
  norm.name = "norm";
  norm.arguments.resize(4);
  norm.returns.resize(1);
  graph::Op norm_list = norm;
  norm_list.name = "_foreach_norm";
  norm_list.arguments.resize(3);
  norm_list.item = &norm;
  norm_list.item_arguments = {
      {0, {}}, {1, {}}, {-1, {graph::make_tag(graph::Tag::kBool), 0}}, {2, {}}};
  const auto x = b.buffers(2);
  const auto y = b.buffers(2, graph::BufferKind::kFresh);
  b.begin(norm_list);
  b.list(x);
  b.graph.words.insert(b.graph.words.end(), {graph::make_tag(graph::Tag::kInt), 2});
  b.graph.words.push_back(graph::make_tag(graph::Tag::kNone));
  b.results();
  b.list(y);
  b.end();
  EXPECT_EQ(b.lowered(), (std::vector<std::string>{"%2 = norm(%0, 2, False, None)",
                                                   "%3 = norm(%1, 2, False, None)"}));
}

TEST(Lists, AnItemWithoutAFormInPlaceIsGivenItsOwnTensorAsOut) {
  Lists b;
  graph::Op maximum;
  maximum.name = "maximum.out";
  maximum.arguments.resize(3);
  maximum.arguments[2].writes = true;
  graph::Op maximum_list;
  maximum_list.name = "_foreach_maximum_";
  maximum_list.arguments.resize(2);
  maximum_list.arguments[0].writes = true;
  maximum_list.item = &maximum;
  maximum_list.item_arguments = {{0, {}}, {1, {}}, {0, {}}};
  const auto x = b.buffers(2);
  const auto y = b.buffers(2);
  b.begin(maximum_list);
  b.list(x);
  b.list(y);
  b.results();
  b.end();
  EXPECT_EQ(b.lowered(),
            (std::vector<std::string>{"maximum.out(%0, %2, %0)", "maximum.out(%1, %3, %1)"}));
}

TEST(Lists, WhatDoesNotStayIsLeftOut) {
  Lists b;
  const auto x = b.buffers(2);
  const auto root = b.buffers(2, graph::BufferKind::kFresh);
  b.sqrt_of(x, root);
  EXPECT_TRUE(passes::run_lists_by_item(b.graph, {false}, /*split=*/true).nodes.empty());
}

}  // namespace
}  // namespace acc
