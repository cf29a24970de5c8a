// Where a graph waits for what it has begun to send and to receive.
#include <gtest/gtest.h>

#include "lazy/graph/edges.h"
#include "lazy/passes/transfers.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Tag;
using testing::Vector;
using Lines = std::vector<std::string>;

class Program : public testing::GraphBuilder {
 public:
  Program() {
    await_.name = "await_";
    await_.arguments = {{.name = "outputs", .list = graph::ListOf::kTensor, .writes = true},
                        {.name = "inputs", .list = graph::ListOf::kTensor},
                        {.name = "ticket"}};
    await_.writes = true;
    await_.removable = false;
    transfer_ = await_;
    transfer_.name = "transfer_";
    transfer_.arguments = {{.name = "outputs", .list = graph::ListOf::kTensor, .writes = true},
                           {.name = "inputs", .list = graph::ListOf::kTensor},
                           {.name = "group"},
                           {.name = "options", .list = graph::ListOf::kInt},
                           {.name = "ticket"}};
    transfer_.communicates = true;
    transfer_.await = &await_;
  }

  void transfer(std::initializer_list<Vector> outputs, std::initializer_list<Vector> inputs) {
    graph::Node node;
    node.op = &transfer_;
    node.source = 7;
    node.ambient = 5;
    node.words = static_cast<uint32_t>(graph.words.size());
    list(outputs);
    list(inputs);
    const int64_t integer = graph::make_tag(Tag::kInt);
    graph.words.insert(graph.words.end(),
                       {integer, 3, graph::make_tag(Tag::kList, 0, 0, 1), integer, 1, integer, -1});
    node.outputs = node.end = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
    for (const Vector& output : outputs) graph.buffers[output.buffer].written = true;
  }

  graph::Graph overlapped() const { return passes::overlap_transfers(graph); }
  Lines lines() const { return testing::lines_of(overlapped()); }

 private:
  void list(std::initializer_list<Vector> tensors) {
    graph.words.push_back(graph::make_tag(Tag::kList, 0, 0, tensors.size()));
    for (const Vector& t : tensors) {
      graph.words.insert(graph.words.end(), {graph::make_tag(Tag::kTensor, t.dtype, 0, 1), t.buffer,
                                             t.offset, t.elements, 1});
    }
  }

  graph::Op transfer_;
  graph::Op await_;
};

TEST(Transfers, AReaderWaitsAndWhatStandsBeforeItDoesNot) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t y = p.input();
  const uint32_t z = p.fresh();
  p.transfer({{x}}, {});
  p.call("tanh", {{y}}, {{z}});
  p.call("relu", {{x}}, {{p.fresh()}});
  EXPECT_EQ(p.lines(),
            (Lines{"transfer_([%0:f32[4]], [], 3, [1], 0)", "%2:f32[4] = tanh(%1:f32[4])",
                   "await_([%0:f32[4]], [], 0)", "%3:f32[4] = relu(%0:f32[4])"}));
}

TEST(Transfers, WhatNobodyTouchesIsWaitedForAtTheEnd) {
  Program p;
  p.transfer({{p.input()}}, {});
  p.transfer({{p.input()}}, {});
  EXPECT_EQ(p.lines(),
            (Lines{"transfer_([%0:f32[4]], [], 3, [1], 0)", "transfer_([%1:f32[4]], [], 3, [1], 1)",
                   "await_([%0:f32[4]], [], 0)", "await_([%1:f32[4]], [], 1)"}));
}

TEST(Transfers, WhatIsSentMayBeReadAndNotWritten) {
  Program p;
  const uint32_t x = p.input();
  p.transfer({{p.input()}}, {{x}});
  p.call("relu", {{x}}, {{p.fresh()}});
  p.in_place("zero_", {{x}});
  EXPECT_EQ(p.lines(),
            (Lines{"transfer_([%1:f32[4]], [%0:f32[4]], 3, [1], 0)", "%2:f32[4] = relu(%0:f32[4])",
                   "await_([%1:f32[4]], [%0:f32[4]], 0)", "zero_(%0:f32[4])"}));
}

TEST(Transfers, OtherBytesOfTheStorageDoNotWait) {
  Program p;
  const uint32_t x = p.input();
  p.in_place("zero_", {{x, 4}});
  const uint32_t behind = p.input_view(x, 16);
  p.graph.buffers[behind].written = true;
  p.transfer({{x}}, {});
  p.in_place("add_", {{behind}});
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[3], "await_([%0:f32[4]], [], 0)");
}

TEST(Transfers, ASecondTransferOfTheSameBytesWaits) {
  Program p;
  const uint32_t x = p.input();
  p.transfer({{x}}, {});
  p.transfer({{x}}, {});
  const Lines lines = p.lines();
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[1], "await_([%0:f32[4]], [], 0)");
  EXPECT_EQ(lines[3], "await_([%0:f32[4]], [], 1)");
}

TEST(Transfers, WaitsHaveTheLineAndTheSettingsOfTheirTransfer) {
  Program p;
  p.transfer({{p.input()}}, {});
  const graph::Graph out = p.overlapped();
  EXPECT_EQ(out.buffers, p.graph.buffers);
  ASSERT_EQ(out.nodes.size(), 2U);
  EXPECT_EQ(out.nodes[1].source, 7U);
  EXPECT_EQ(out.nodes[1].ambient, 5U);
}

TEST(Transfers, GraphsWithoutAnyAreTold) {
  Program p;
  p.call("relu", {{p.input()}}, {{p.fresh()}});
  EXPECT_FALSE(passes::communicates(p.graph));
  p.transfer({{p.input()}}, {});
  EXPECT_TRUE(passes::communicates(p.graph));
}

TEST(Transfers, AWaitStandsBehindTheBeginOfWhatBringsNothing) {
  Program p;
  const uint32_t x = p.input();
  p.transfer({}, {{x}});  // a gather to another process
  p.transfer({}, {{p.input()}});
  p.in_place("zero_", {{x}});
  const graph::Graph graph = p.overlapped();
  EXPECT_EQ(
      testing::lines_of(graph),
      (Lines{"transfer_([], [%0:f32[4]], 3, [1], 0)", "transfer_([], [%1:f32[4]], 3, [1], 1)",
             "await_([], [%0:f32[4]], 0)", "zero_(%0:f32[4])", "await_([], [%1:f32[4]], 1)"}));
  constexpr graph::Hazard kEnd = graph::Hazard::kTransferEnd;
  EXPECT_EQ(graph::edges(graph),
            (std::vector<graph::Edge>{{0, 1, graph::Hazard::kTransferOrder},
                                      {0, 2, kEnd},
                                      {0, 3, graph::Hazard::kWriteAfterRead},
                                      {1, 4, kEnd},
                                      {2, 3, graph::Hazard::kWriteAfterRead}}));
}

}  // namespace
}  // namespace acc
