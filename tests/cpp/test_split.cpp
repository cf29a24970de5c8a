// Backwards with several results become a call for the input's gradient and one for the others.
#include <gtest/gtest.h>

#include "lazy/passes/split.h"
#include "lazy/passes/switches.h"
#include "lazy/plan/plan.h"
#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Tag;
using Lines = std::vector<std::string>;

struct Program : testing::GraphBuilder {
  graph::Op op;

  // A backward of `gradient` with those results that the mask asks for; `stride` of its rows.
  explicit Program(const char* name, std::vector<bool> mask, int64_t stride = 4) {
    op.name = name;
    op.arguments = {{.name = "grad_out"}, {.name = "input"}, {.name = "output_mask"}};
    op.returns.resize(mask.size());
    graph::Node node;
    node.op = &op;
    node.ambient = 5;
    for (const uint32_t buffer : {input(), input()}) matrix(buffer, stride);
    graph.words.push_back(graph::make_tag(Tag::kList, 0, 0, mask.size()));
    for (const bool wanted : mask) {
      graph.words.insert(graph.words.end(), {graph::make_tag(Tag::kBool), wanted ? 1 : 0});
    }
    node.outputs = static_cast<uint32_t>(graph.words.size());
    for (const bool wanted : mask) {
      if (wanted) {
        matrix(fresh(32), 4);
      } else {
        graph.words.push_back(graph::make_tag(Tag::kUndefined));
      }
    }
    node.end = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
  }
  void matrix(uint32_t buffer, int64_t stride) {
    graph.words.insert(graph.words.end(), {graph::make_tag(Tag::kTensor, graph::dtype::kF32, 0, 2),
                                           buffer, 0, 2, 4, stride, 1});
  }
  bool unchanged() const {
    return testing::lines_of(passes::split_backwards(graph)) == testing::lines_of(graph);
  }
};

constexpr const char* kLayerNorm = "aten::native_layer_norm_backward";
constexpr const char* kGroupNorm = "aten::native_group_norm_backward";

TEST(Split, TheInputsGradientIsACallOfItsOwn) {
  for (const char* name : {kLayerNorm, kGroupNorm}) {
    const Program p(name, {true, true, true});
    const std::string call = std::string(" = ") + name + "(%0:f32[2,4], %1:f32[2,4], [";
    EXPECT_EQ(testing::lines_of(passes::split_backwards(p.graph)),
              (Lines{"%2:f32[2,4], undefined, undefined" + call + "True, False, False])",
                     "undefined, %3:f32[2,4], %4:f32[2,4]" + call + "False, True, True])"}));
  }
}

TEST(Split, SettingsAndBuffersStay) {
  const Program p(kLayerNorm, {true, true, true});
  const graph::Graph out = passes::split_backwards(p.graph);
  EXPECT_EQ(out.buffers, p.graph.buffers);
  for (const graph::Node& node : out.nodes) EXPECT_EQ(node.ambient, 5U);
}

TEST(Split, ResultsThatNobodyAskedForStayAway) {
  const Program p(kLayerNorm, {true, false, true});
  const Lines lines = testing::lines_of(passes::split_backwards(p.graph));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_TRUE(lines[1].starts_with("undefined, undefined, %3")) << lines[1];
  EXPECT_TRUE(lines[1].ends_with("[False, False, True])")) << lines[1];
}

TEST(Split, NothingToSplit) {
  EXPECT_TRUE(Program(kLayerNorm, {true, false, false}).unchanged());
  EXPECT_TRUE(Program(kLayerNorm, {false, true, true}).unchanged());
  EXPECT_TRUE(Program("aten::native_batch_norm_backward", {true, true, true}).unchanged());
}

// ATen's own would end the process.
TEST(Split, GroupNormOfChannelsLastStays) {
  EXPECT_TRUE(Program(kGroupNorm, {true, true, true}, /*stride=*/1).unchanged());
  EXPECT_FALSE(Program(kLayerNorm, {true, true, true}, /*stride=*/1).unchanged());
}

// So it is compared with the call that it was (lazy/plan/contest.h).
TEST(Split, APlanWithPartsIsUnproven) {
  const auto is_unproven = [](std::initializer_list<bool> mask, bool fuse) {
    const Program p(kLayerNorm, mask);
    const std::vector<bool> all(p.graph.buffers.size(), true);
    passes::skip("fuse");  // the operator here lacks most of its arguments
    const bool unproven = plan::build(p.graph, {}, all, {.fuse = fuse})->unproven;
    passes::skip("");
    return unproven;
  };
  EXPECT_TRUE(is_unproven({true, true, true}, true));
  EXPECT_FALSE(is_unproven({true, false, false}, true));
  EXPECT_FALSE(is_unproven({true, true, true}, false));
}

}  // namespace
}  // namespace acc
