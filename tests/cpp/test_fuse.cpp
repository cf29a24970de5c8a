#include "lazy/passes/fuse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "lazy/graph/edges.h"
#include "lazy/passes/batch.h"
#include "lazy/plan/plan.h"
#include "lazy/plan/print.h"
#include "tests/cpp/elementwise_builder.h"

namespace acc {
namespace {

using passes::Cluster;

struct Program : testing::ElementwiseBuilder {
  std::vector<std::vector<uint32_t>> clusters() const {
    std::vector<std::vector<uint32_t>> nodes;
    for (const Cluster& cluster : passes::fuse(graph)) nodes.push_back(cluster.nodes);
    return nodes;
  }
};

using Nodes = std::vector<std::vector<uint32_t>>;

TEST(Fuse, AChainIsOneCluster) {
  Program p;
  uint32_t x = p.input();
  for (int i = 0; i < 5; ++i) x = p.unary("aten::exp", x);
  EXPECT_EQ(p.clusters(), (Nodes{{0, 1, 2, 3, 4}}));
}

// As ACC_DUMP=passes tells it.
TEST(Fuse, IsToldAsLoopsAroundWhatRunsAlone) {
  Program p;
  const uint32_t x = p.unary("aten::exp", p.input());
  const uint32_t y = p.opaque(x);
  p.product(p.unary("aten::neg", x), x);
  p.product(p.unary("aten::exp", y), y);
  EXPECT_EQ(plan::print(p.graph, passes::fuse(p.graph)),
            "loops 0 {\n"
            "  %1:f32[4] = aten::exp(%0:f32[4])\n"
            "  %3:f32[4] = aten::neg(%1:f32[4])\n"
            "  %4:f32[4] = aten::mul.Tensor(%3:f32[4], %1:f32[4])\n"
            "}\n"
            "%2:f32[4] = aten::sort(%1:f32[4])\n"
            "loops 1 {\n"
            "  %5:f32[4] = aten::exp(%2:f32[4])\n"
            "  %6:f32[4] = aten::mul.Tensor(%5:f32[4], %2:f32[4])\n"
            "}\n");
}

TEST(Fuse, WhatHasNoFormulaStandsAlone) {
  Program p;
  const uint32_t x = p.unary("aten::exp", p.input());
  const uint32_t y = p.opaque(x);
  p.unary("aten::exp", y);
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}, {2}}));
}

TEST(Fuse, NothingIsJoinedAroundWhatHasToRunBetween) {
  Program p;
  const uint32_t x = p.unary("aten::exp", p.input());
  const uint32_t y = p.opaque(x);
  p.product(x, y);  // reads x, and y that depends on x through the opaque call
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}, {2}}));
}

TEST(Fuse, OtherElementsAreOtherLoops) {
  Program p;
  const uint32_t x = p.unary("aten::exp", p.input(), 8);
  p.unary("aten::exp", x, 4);  // half of x
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}}));
}

TEST(Fuse, AWriteInPlaceJoinsWhatReadItBefore) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t y = p.unary("aten::exp", x);
  p.scale_in_place(x, y);
  p.unary("aten::neg", x);
  EXPECT_EQ(p.clusters(), (Nodes{{0, 1, 2}}));
}

TEST(Fuse, OverlappingViewsAreNotJoined) {
  Program p;
  const uint32_t x = p.input();
  const uint32_t shifted = p.input_view(x, 4);  // one element further on
  const uint32_t y = p.unary("aten::exp", shifted);
  p.scale_in_place(x, y);
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}}));
}

TEST(Fuse, DoesNotHoldManyProductsForOneSum) {
  Program p;
  const uint32_t x = p.input();
  uint32_t sum = p.opaque(x, 1024);
  for (int i = 0; i < 5; ++i) sum = p.product(sum, p.opaque(x, 1024), 1024);
  for (const std::vector<uint32_t>& nodes : p.clusters()) EXPECT_LE(nodes.size(), 2U);
}

TEST(Fuse, NeighboursThatReadTheSameAreJoined) {
  Program p;
  const uint32_t x = p.opaque(p.input());
  const uint32_t y = p.unary("aten::exp", x);
  p.unary("aten::neg", x);
  p.unary("aten::neg", y);
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1, 2, 3}}));
}

TEST(Fuse, ReadersOfTheSameAreNotJoinedAroundOtherCalls) {
  Program p;
  const uint32_t x = p.opaque(p.input());
  p.unary("aten::exp", x);
  p.opaque(x);
  p.unary("aten::neg", x);
  EXPECT_EQ(p.clusters().size(), 4U);
}

TEST(Fuse, ReadersOfTheSameAreNotJoinedAroundAWrite) {
  Program p;
  const uint32_t x = p.input();
  p.unary("aten::exp", x);
  p.in_place("aten::sort_", {{x}});
  p.unary("aten::neg", x);
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}, {2}}));
}

TEST(Fuse, ReadersOfDifferentElementsAreNotJoined) {
  Program p;
  const uint32_t x = p.opaque(p.input(), 8);
  p.unary("aten::exp", x, 8);
  p.unary("aten::neg", x, 4);
  EXPECT_EQ(p.clusters(), (Nodes{{0}, {1}, {2}}));
}

TEST(Fuse, ReadersOfTheSameStopAtTheCap) {
  Program p;
  const uint32_t x = p.opaque(p.input());
  for (int i = 0; i < 100; ++i) p.unary("aten::neg", x);
  const Nodes clusters = p.clusters();
  EXPECT_EQ(clusters.size(), 4U);  // two accesses each, 96 at most
  for (const std::vector<uint32_t>& nodes : clusters) EXPECT_LE(nodes.size(), 48U);
}

TEST(Batch, IndependentLaunchesOfOneKernelAreOneStep) {
  Program p;
  std::vector<bool> outputs;
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = p.input();
    const uint32_t y = p.input();
    p.scale_in_place(x, y, 4 + i);
  }
  outputs.assign(p.graph.buffers.size(), false);
  const auto batches = passes::batch(p.graph, passes::fuse(p.graph), outputs);
  ASSERT_EQ(batches.size(), 1U);
  EXPECT_EQ(batches[0].launches.size(), 4U);
  EXPECT_EQ(batches[0].launches[3].elements, 7);
  EXPECT_EQ(batches[0].nodes, (std::vector<uint32_t>{0, 1, 2, 3}));
}

// Gradients that the same step made and scales. A launch that makes new memory of that size stays
// where it is, since the memory would be held from an earlier step on.
TEST(Batch, LaunchesThatWriteOverWhatIsThereAreOneStepWhateverTheirSize) {
  constexpr int64_t kLarge = 1 << 20;
  Program over;
  std::vector<uint32_t> gradients;
  for (int i = 0; i < 3; ++i) gradients.push_back(over.opaque(over.input(), kLarge));
  for (const uint32_t gradient : gradients) over.scale_in_place(gradient, over.input(), kLarge);
  const auto joined = passes::batch(over.graph, passes::fuse(over.graph),
                                    std::vector<bool>(over.graph.buffers.size(), true));
  ASSERT_EQ(joined.size(), 4U);
  EXPECT_EQ(joined.back().launches.size(), 3U);

  Program anew;
  for (int i = 0; i < 3; ++i) anew.product(anew.input(), anew.input(), kLarge);
  const auto apart = passes::batch(anew.graph, passes::fuse(anew.graph),
                                   std::vector<bool>(anew.graph.buffers.size(), true));
  EXPECT_EQ(apart.size(), 3U);
}

// As ACC_DUMP=passes tells it.
TEST(Batch, IsToldAsKernelsWithTheirLaunches) {
  Program p;
  for (int i = 0; i < 3; ++i) {
    const uint32_t x = p.input();
    p.scale_in_place(x, p.input(), 4 + i);
    p.opaque(x, 4 + i);
  }
  std::string told;
  const auto observe = [&](const char* pass, const std::string& text) {
    if (pass == std::string("batch")) told = text;
  };
  const size_t buffers = p.graph.buffers.size();
  plan::build(std::move(p.graph), {}, std::vector<bool>(buffers, true), {}, observe);
  EXPECT_EQ(told,
            "kernel 0, 3 launches {\n"
            "  aten::mul_.Tensor(%0:f32[4], %1:f32[4])\n"
            "  aten::mul_.Tensor(%3:f32[5], %4:f32[5])\n"
            "  aten::mul_.Tensor(%6:f32[6], %7:f32[6])\n"
            "}\n"
            "%2:f32[4] = aten::sort(%0:f32[4])\n"
            "%5:f32[5] = aten::sort(%3:f32[5])\n"
            "%8:f32[6] = aten::sort(%6:f32[6])\n");
}

TEST(Batch, WhatNobodySeesIsNotStored) {
  Program p;
  const uint32_t x = p.unary("aten::exp", p.input());
  const uint32_t y = p.unary("aten::neg", x);
  std::vector<bool> outputs(p.graph.buffers.size(), false);
  outputs[y] = true;
  auto batches = passes::batch(p.graph, passes::fuse(p.graph), outputs);
  ASSERT_EQ(batches.size(), 1U);
  EXPECT_EQ(batches[0].kernel.stores.size(), 1U);
  outputs[x] = true;
  batches = passes::batch(p.graph, passes::fuse(p.graph), outputs);
  EXPECT_EQ(batches[0].kernel.stores.size(), 2U);
}

// Random programs: every node is in exactly one cluster, and no cluster comes before what it needs.
TEST(Fuse, TheOrderSatisfiesEveryDependence) {
  std::mt19937 random(7);
  size_t joined = 0;
  for (int round = 0; round < 300; ++round) {
    Program p;
    std::vector<uint32_t> made{p.input(), p.input(), p.input()};
    const auto any = [&] { return made[random() % made.size()]; };
    for (int i = 0; i < 40; ++i) {
      switch (random() % 6) {
        case 0:
          made.push_back(p.opaque(any()));
          break;
        case 1:
          made.push_back(p.unary("aten::exp", any()));
          break;
        case 2:
          p.scale_in_place(any(), any());
          break;
        case 3:
          made.push_back(p.unary("aten::neg", any(), 2));
          break;
        default:
          made.push_back(p.product(any(), any()));
      }
    }
    const auto clusters = passes::fuse(p.graph);
    std::vector<int> place(p.graph.nodes.size(), -1);
    for (size_t i = 0; i < clusters.size(); ++i) {
      joined += clusters[i].nodes.size() > 1 ? 1 : 0;
      ASSERT_TRUE(std::ranges::is_sorted(clusters[i].nodes));
      for (const uint32_t node : clusters[i].nodes) {
        ASSERT_EQ(place[node], -1);
        place[node] = static_cast<int>(i);
      }
    }
    ASSERT_TRUE(std::ranges::find(place, -1) == place.end());
    for (const graph::Edge& edge : graph::edges(p.graph)) {
      ASSERT_LE(place[edge.from], place[edge.to]) << "round " << round;
    }
  }
  EXPECT_GT(joined, 300U);
}

}  // namespace
}  // namespace acc
