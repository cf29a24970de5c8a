#include "lazy/plan/difference.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;
using plan::Change;
using plan::Difference;
using testing::GraphBuilder;

// One operator of each name for all graphs, as in a process: graphs are compared by operator.
const graph::Op* op_of(const std::string& name) {
  static auto& builders = *new std::vector<std::pair<std::string, GraphBuilder*>>;
  for (const auto& [known, builder] : builders) {
    if (known == name) return &builder->last_op();
  }
  auto* const builder = new GraphBuilder;
  builder->call(name, {{builder->input()}}, {{builder->fresh()}});
  builder->last_op().arguments[0].name = "self";
  builders.emplace_back(name, builder);
  return &builder->last_op();
}

// x -> each operator in turn, every one recorded on a line of its own.
GraphBuilder chain(const std::vector<std::string>& names, int64_t elements = 4) {
  GraphBuilder b;
  uint32_t from = b.input();
  for (const std::string& name : names) {
    const uint32_t to = b.fresh();
    const size_t node = b.call(name, {{from, elements}}, {{to, elements}});
    b.graph.nodes[node].op = op_of(name);
    b.graph.nodes[node].source = static_cast<uint32_t>(node) + 1;
    from = to;
  }
  return b;
}

// The words of the first tensor of a node.
int64_t* first_word(Graph& graph, size_t node) {
  return graph.words.data() + graph.nodes[node].words;
}

TEST(Difference, EqualStepsHaveNone) {
  EXPECT_EQ(plan::difference(chain({"exp", "sin"}).graph, chain({"exp", "sin"}).graph).change,
            Change::kNothing);
}

TEST(Difference, AnotherShapeIsNamedWithOperatorArgumentAndLine) {
  const Difference found =
      plan::difference(chain({"exp", "sin"}, 4).graph, chain({"exp", "sin"}, 3).graph);
  EXPECT_EQ(found.change, Change::kArgument);
  EXPECT_EQ(found.op, "exp");
  EXPECT_EQ(found.argument, "self");
  EXPECT_EQ(found.aspect, "shape");
  EXPECT_EQ(found.before, "[4]");
  EXPECT_EQ(found.after, "[3]");
  EXPECT_EQ(found.source, 1U);
}

TEST(Difference, TheFirstOneCounts) {
  GraphBuilder other = chain({"exp", "sin", "cos"});
  for (const size_t node : {1, 2}) {
    int64_t* const word = first_word(other.graph, node);
    *word = graph::make_tag(Tag::kTensor, graph::dtype::kF64, 0, 1);
  }
  const Difference found = plan::difference(chain({"exp", "sin", "cos"}).graph, other.graph);
  EXPECT_EQ(found.node, 1U);
  EXPECT_EQ(found.op, "sin");
  EXPECT_EQ(found.source, 2U);
  EXPECT_EQ(found.aspect, "dtype");
  EXPECT_EQ(found.before, "float32");
  EXPECT_EQ(found.after, "float64");
}

TEST(Difference, StridesAndOffsetsAreTold) {
  GraphBuilder strided = chain({"exp"});
  first_word(strided.graph, 0)[4] = 2;
  EXPECT_EQ(plan::difference(chain({"exp"}).graph, strided.graph).aspect, "strides");
  GraphBuilder moved = chain({"exp"});
  first_word(moved.graph, 0)[2] = 8;
  const Difference found = plan::difference(chain({"exp"}).graph, moved.graph);
  EXPECT_EQ(found.aspect, "offset");
  EXPECT_EQ(found.after, "8");
}

TEST(Difference, OperatorsThatWerePutInAreCounted) {
  const Graph before = chain({"exp", "sin", "cos", "tan", "log"}).graph;
  const Graph now = chain({"exp", "abs", "neg", "sin", "cos", "tan", "log"}).graph;
  const Difference more = plan::difference(before, now);
  EXPECT_EQ(more.change, Change::kOperator);
  EXPECT_EQ(more.aspect, "2 operators more");
  EXPECT_EQ(more.before, "sin");
  EXPECT_EQ(more.after, "abs");
  EXPECT_EQ(more.source, 2U);
  const Difference fewer = plan::difference(now, before);
  EXPECT_EQ(fewer.aspect, "2 operators fewer");
  EXPECT_EQ(fewer.after, "sin");
}

TEST(Difference, AnotherOperatorIsJustThat) {
  const Difference found =
      plan::difference(chain({"exp", "sin", "cos"}).graph, chain({"exp", "tan", "cos"}).graph);
  EXPECT_EQ(found.aspect, "operator");
  EXPECT_EQ(found.before, "sin");
  EXPECT_EQ(found.after, "tan");
}

TEST(Difference, AStepThatEndsEarlyOrGoesOnSaysWithWhat) {
  const Graph whole = chain({"exp", "sin", "cos"}).graph;
  const Graph part = chain({"exp"}).graph;
  const Difference shorter = plan::difference(whole, part);
  EXPECT_EQ(shorter.change, Change::kShorter);
  EXPECT_EQ(shorter.node, 1U);
  EXPECT_EQ(shorter.op, "exp");
  EXPECT_EQ(shorter.before, "sin");
  EXPECT_EQ(shorter.aspect, "2 operators fewer");
  const Difference longer = plan::difference(part, whole);
  EXPECT_EQ(longer.change, Change::kLonger);
  EXPECT_EQ(longer.op, "sin");
  EXPECT_EQ(longer.source, 2U);
}

TEST(Difference, SettingsGoBeforeWhatTheyChange) {
  GraphBuilder other = chain({"exp", "sin"}, 3);
  other.graph.nodes[0].ambient = 5;
  const Difference found = plan::difference(chain({"exp", "sin"}).graph, other.graph);
  EXPECT_EQ(found.change, Change::kSetting);
  EXPECT_EQ(found.ambient_before, 0U);
  EXPECT_EQ(found.ambient_after, 5U);
}

// add(x, y) where both are inputs, or the same.
GraphBuilder sum(bool same) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = same ? x : b.input();
  const uint32_t z = b.fresh();
  b.call("add", {{x}, {y}}, {{z}});
  b.last_op().arguments[1].name = "other";
  static const graph::Op& shared = *new graph::Op(b.last_op());
  b.graph.nodes[0].op = &shared;
  return b;
}

TEST(Difference, ArgumentsThatShareMemoryNowAreNamed) {
  const Difference found = plan::difference(sum(false).graph, sum(true).graph);
  EXPECT_EQ(found.change, Change::kMemory);
  EXPECT_EQ(found.argument, "other");
  EXPECT_EQ(found.aspect, "memory");
}

TEST(Difference, MemoryWithoutContentsIsToldFromMemoryWithSome) {
  GraphBuilder other = chain({"exp"});
  other.graph.buffers[0].kind = graph::BufferKind::kFresh;
  const Difference found = plan::difference(chain({"exp"}).graph, other.graph);
  EXPECT_EQ(found.change, Change::kMemory);
  EXPECT_EQ(found.before, "had contents before the step");
  EXPECT_EQ(found.after, "had none");
}

// A call with structural numbers: a list of them, and one that is a value.
GraphBuilder with_numbers(std::vector<int64_t> dims, bool value) {
  static const graph::Op& op = *[] {
    auto* const made = new graph::Op;
    made->name = "sum";
    made->arguments.resize(2);
    made->arguments[0].name = "dim";
    made->arguments[1].name = "alpha";
    return made;
  }();
  GraphBuilder b;
  Node node;
  node.op = &op;
  b.graph.words.push_back(graph::make_tag(Tag::kList, 0, 0, dims.size()));
  for (const int64_t dim : dims) {
    b.graph.words.push_back(graph::make_tag(Tag::kInt));
    b.graph.words.push_back(dim);
  }
  b.graph.words.push_back(graph::make_tag(Tag::kFloat, 0, value ? graph::kValueFlag : 0));
  if (!value) b.graph.words.push_back(0);
  node.outputs = node.end = static_cast<uint32_t>(b.graph.words.size());
  b.graph.nodes.push_back(node);
  return b;
}

TEST(Difference, NumbersThatAreStructureAreToldWithTheirValues) {
  const Difference found =
      plan::difference(with_numbers({0}, true).graph, with_numbers({1}, true).graph);
  EXPECT_EQ(found.argument, "dim");
  EXPECT_EQ(found.aspect, "value");
  EXPECT_EQ(found.before, "[0]");
  EXPECT_EQ(found.after, "[1]");
  EXPECT_EQ(plan::difference(with_numbers({0}, true).graph, with_numbers({0, 1}, true).graph).after,
            "[0, 1]");
  EXPECT_EQ(
      plan::difference(with_numbers({0}, true).graph, with_numbers({0}, false).graph).argument,
      "alpha");
}

TEST(Difference, OperatorsInCommonAreCountedFromTheFirstOn) {
  const Graph a = chain({"exp", "sin", "cos"}).graph;
  EXPECT_EQ(plan::common_operators(a, chain({"exp", "sin", "tan"}, 7).graph), 2U);
  EXPECT_EQ(plan::common_operators(a, chain({"sin"}).graph), 0U);
  EXPECT_EQ(plan::common_operators(a, Graph()), 0U);
}

}  // namespace
}  // namespace acc
