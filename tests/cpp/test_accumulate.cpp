#include "lazy/passes/accumulate.h"

#include <gtest/gtest.h>

#include <deque>

#include "lazy/graph/words.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Tag;
using testing::GraphBuilder;
using testing::Vector;

// Products and additions; the calls that accumulate have names of their own.
struct Program : GraphBuilder {
  std::deque<graph::Op> accumulating;

  uint32_t product(uint32_t a, uint32_t b) {
    const uint32_t made = fresh();
    call("aten::mm", {{a}, {b}}, {{made}});
    graph::Op& plus = accumulating.emplace_back();
    plus.name = "aten::addmm";
    graph::Op& in_place = accumulating.emplace_back();
    in_place.name = "aten::addmm_";
    for (graph::Op* op : {&plus, &in_place}) {
      op->arguments.resize(5);
      op->arguments[0].writes = op == &in_place;
      op->writes = op == &in_place;
    }
    plus.returns.push_back({});
    last_op().plus = &plus;
    last_op().plus_in_place = &in_place;
    return made;
  }

  // sum + other.
  uint32_t add(uint32_t sum, uint32_t other) {
    const uint32_t made = fresh();
    call("aten::add.Tensor", {{sum}, {other}}, {{made}});
    put_alpha({graph::make_tag(Tag::kInt), 1});
    return made;
  }
  void add_in_place(Vector sum, uint32_t other) {
    in_place("aten::add_.Tensor", {sum}, {{other}});
    put_alpha({graph::make_tag(Tag::kInt), 1});
  }
  // sum + alpha * other, with alpha in the value block.
  void add_scaled_in_place(uint32_t sum, uint32_t other) {
    in_place("aten::add_.Tensor", {{sum}}, {{other}});
    put_alpha({graph::make_tag(Tag::kFloat, 0, graph::kValueFlag)});
    graph.nodes.back().n_values = 1;
  }

  std::vector<std::string> run(std::initializer_list<uint32_t> outputs) {
    std::vector<bool> alive(graph.buffers.size(), false);
    for (const uint32_t buffer : outputs) alive[buffer] = true;
    out = passes::accumulate_products(graph, alive);
    std::vector<std::string> names;
    for (const graph::Node& node : out.nodes) names.push_back(node.op->name);
    return names;
  }
  graph::Graph out;

 private:
  void put_alpha(std::initializer_list<int64_t> item) {
    last_op().arguments.emplace_back().name = "alpha";
    graph::Node& node = graph.nodes.back();
    graph.words.insert(graph.words.begin() + node.outputs, item);
    node.outputs += static_cast<uint32_t>(item.size());
    node.end += static_cast<uint32_t>(item.size());
  }
};

using Names = std::vector<std::string>;

TEST(Accumulate, AnAdditionInPlaceTakesTheProductIn) {
  Program p;
  const uint32_t a = p.input(), b = p.input(), sum = p.input();
  p.add_in_place({sum}, p.product(a, b));
  EXPECT_EQ(p.run({}), (Names{"aten::addmm_"}));
  const graph::Node& node = p.out.nodes[0];
  const auto items = graph::items(p.out.arguments(node));
  ASSERT_EQ(items.size(), 5U);
  EXPECT_EQ(graph::read_tensor(items[0]).buffer, sum);
  EXPECT_EQ(graph::read_tensor(items[1]).buffer, a);
  EXPECT_EQ(graph::read_tensor(items[2]).buffer, b);
  EXPECT_EQ(items[3][1], 1);  // beta
  EXPECT_EQ(items[4][1], 1);  // alpha
  EXPECT_EQ(node.n_values, 0U);
  EXPECT_TRUE(p.out.results(node).empty());
}

TEST(Accumulate, TheTextBeforeAndAfter) {
  Program p;
  const uint32_t a = p.input(), b = p.input(), sum = p.input();
  p.add_in_place({sum}, p.product(a, b));
  const uint32_t second = p.add(sum, p.product(b, a));
  EXPECT_EQ(testing::lines_of(p.graph),
            (Names{"%3:f32[4] = aten::mm(%0:f32[4], %1:f32[4])",
                   "aten::add_.Tensor(%2:f32[4], %3:f32[4], 1)",
                   "%4:f32[4] = aten::mm(%1:f32[4], %0:f32[4])",
                   "%5:f32[4] = aten::add.Tensor(%2:f32[4], %4:f32[4], 1)"}));
  p.run({second});
  EXPECT_EQ(testing::lines_of(p.out),
            (Names{"aten::addmm_(%2:f32[4], %0:f32[4], %1:f32[4], 1, 1)",
                   "%5:f32[4] = aten::addmm(%2:f32[4], %1:f32[4], %0:f32[4], 1, 1)"}));
}

TEST(Accumulate, AnAdditionThatMakesAResultToo) {
  Program p;
  const uint32_t first = p.product(p.input(), p.input());
  const uint32_t sum = p.add(first, p.product(p.input(), p.input()));
  EXPECT_EQ(p.run({sum}), (Names{"aten::mm", "aten::addmm"}));
  EXPECT_EQ(graph::read_tensor(p.out.results(p.out.nodes[1]).data()).buffer, sum);
}

TEST(Accumulate, AProductThatSomebodyElseSeesStays) {
  Program p;
  const uint32_t made = p.product(p.input(), p.input());
  p.add_in_place({p.input()}, made);
  EXPECT_EQ(p.run({made}), (Names{"aten::mm", "aten::add_.Tensor"}));
  p.call("aten::relu", {{made}}, {{p.fresh()}});
  EXPECT_EQ(p.run({}), (Names{"aten::mm", "aten::add_.Tensor", "aten::relu"}));
}

TEST(Accumulate, AProductDoesNotMovePastAWriteOfItsOperands) {
  Program p;
  const uint32_t a = p.input(), b = p.input();
  const uint32_t made = p.product(a, b);
  p.in_place("aten::zero_", {{b}});
  p.add_in_place({p.input()}, made);
  EXPECT_EQ(p.run({}), (Names{"aten::mm", "aten::zero_", "aten::add_.Tensor"}));
}

TEST(Accumulate, NothingIsAddedInPlaceToAnOperand) {
  Program p;
  const uint32_t a = p.input();
  p.add_in_place({a}, p.product(a, p.input()));
  EXPECT_EQ(p.run({}), (Names{"aten::mm", "aten::add_.Tensor"}));
}

// The factor may be 0 at another step: products that accumulate would lose their infinities.
TEST(Accumulate, AProductIsNotScaled) {
  Program p;
  p.add_scaled_in_place(p.input(), p.product(p.input(), p.input()));
  EXPECT_EQ(p.run({}), (Names{"aten::mm", "aten::add_.Tensor"}));
}

TEST(Accumulate, TheSumHasTheProductsShape) {
  Program p;
  const uint32_t made = p.product(p.input(), p.input());
  p.add_in_place({p.input(), 1}, made);
  EXPECT_EQ(p.run({}), (Names{"aten::mm", "aten::add_.Tensor"}));
}

}  // namespace
}  // namespace acc
