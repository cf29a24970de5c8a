#include "lazy/graph/edges.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "tests/cpp/graph_builder.h"

namespace acc {
namespace {

using graph::Edge;
using graph::Hazard;
using testing::GraphBuilder;
using testing::Vector;

constexpr Hazard kRaw = Hazard::kReadAfterWrite;
constexpr Hazard kWar = Hazard::kWriteAfterRead;
constexpr Hazard kWaw = Hazard::kWriteAfterWrite;

TEST(Edges, AReaderWaitsForTheWriter) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("relu", {{x}}, {{y}});
  b.call("tanh", {{y}}, {{z}});
  EXPECT_EQ(graph::edges(b.graph), (std::vector<Edge>{{0, 1, kRaw}}));
}

TEST(Edges, AWriterWaitsForReadersAndForTheWriterBefore) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  b.in_place("zero_", {{x}});
  b.call("relu", {{x}}, {{y}});
  b.in_place("mul_", {{x}});
  EXPECT_EQ(graph::edges(b.graph),
            (std::vector<Edge>{{0, 1, kRaw}, {0, 2, kRaw}, {0, 2, kWaw}, {1, 2, kWar}}));
}

TEST(Edges, WhatCommunicatesKeepsItsOrder) {
  GraphBuilder b;
  b.in_place("all_reduce_", {{b.input()}});
  b.last_op().communicates = true;
  b.call("relu", {{b.input()}}, {{b.fresh()}});
  b.in_place("broadcast_", {{b.input()}});
  b.last_op().communicates = true;
  b.in_place("all_reduce_", {{b.input()}});
  b.last_op().communicates = true;
  constexpr Hazard kOrder = Hazard::kTransferOrder;
  EXPECT_EQ(graph::edges(b.graph), (std::vector<Edge>{{0, 2, kOrder}, {2, 3, kOrder}}));
}

TEST(Edges, TwoReadersDoNotWaitForEachOther) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.call("relu", {{x}}, {{b.fresh()}});
  b.call("tanh", {{x}}, {{b.fresh()}});
  EXPECT_TRUE(graph::edges(b.graph).empty());
}

TEST(Edges, WritesToDisjointPartsAreIndependent) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t later = b.input_view(x, 8);
  b.in_place("zero_", {{x, 2}});
  b.in_place("add_", {{later, 2}});
  EXPECT_TRUE(graph::edges(b.graph).empty());
  b.in_place("mul_", {{x, 3}});  // reaches into the second part
  EXPECT_EQ(graph::edges(b.graph),
            (std::vector<Edge>{{0, 2, kRaw}, {0, 2, kWaw}, {1, 2, kRaw}, {1, 2, kWaw}}));
}

TEST(Edges, ANodeDoesNotWaitForItself) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.in_place("addcmul_", {{x}}, {{x}, {x}});
  EXPECT_TRUE(graph::edges(b.graph).empty());
}

TEST(Edges, AnEmptyViewTouchesNothing) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.in_place("zero_", {{x}});
  b.in_place("add_", {{x, 0, 2}});
  EXPECT_TRUE(graph::edges(b.graph).empty());
}

// Random steps over two storages with several views each, and fresh buffers.
GraphBuilder random_graph(std::mt19937& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  GraphBuilder b;
  std::vector<uint32_t> buffers;
  for (int storage = 0; storage < 2; ++storage) {
    const uint32_t first = b.input();
    buffers.push_back(first);
    for (int i = 0; i < 3; ++i) buffers.push_back(b.input_view(first, 4 * (below(17) - 8)));
  }
  const auto vector = [&] {
    return Vector{buffers[static_cast<size_t>(below(static_cast<int64_t>(buffers.size())))],
                  below(6), below(5)};
  };
  const int64_t nodes = 2 + below(14);
  for (int64_t i = 0; i < nodes; ++i) {
    if (below(3) == 0) {
      const uint32_t made = b.fresh(40);
      b.call("make", {vector(), vector()}, {{made, 10}});
      buffers.push_back(made);
    } else if (below(2) == 0) {
      b.in_place("change_", {vector()}, {vector()});
    } else {
      b.in_place("change_both_", {vector(), vector()}, {vector()});
    }
  }
  return b;
}

using Byte = std::pair<uint32_t, int64_t>;  // storage, place

std::vector<Byte> bytes_of(const graph::Graph& graph, const graph::Use& use) {
  const graph::Buffer& buffer = graph.buffers[use.buffer];
  std::vector<Byte> bytes;
  for (int64_t at = use.first_byte; at < use.end_byte; ++at) {
    bytes.emplace_back(buffer.group, buffer.group_offset + at);
  }
  return bytes;
}

TEST(Edges, AreThoseOfAMapOfBytes) {
  std::mt19937 random(1);
  size_t total = 0;
  for (int round = 0; round < 500; ++round) {
    const GraphBuilder b = random_graph(random);
    std::map<Byte, uint32_t> writer;
    std::map<Byte, std::set<uint32_t>> readers;
    std::set<Edge> expected;
    for (uint32_t node = 0; node < b.graph.nodes.size(); ++node) {
      const auto uses = graph::uses(b.graph, b.graph.nodes[node]);
      for (const graph::Use& use : uses) {
        for (const Byte& byte : bytes_of(b.graph, use)) {
          if (!use.reads) continue;
          if (writer.contains(byte)) expected.insert({writer[byte], node, kRaw});
          readers[byte].insert(node);
        }
      }
      for (const graph::Use& use : uses) {
        for (const Byte& byte : bytes_of(b.graph, use)) {
          if (!use.writes) continue;
          for (const uint32_t reader : readers[byte]) {
            if (reader != node) expected.insert({reader, node, kWar});
          }
          if (writer.contains(byte) && writer[byte] != node) {
            expected.insert({writer[byte], node, kWaw});
          }
          writer[byte] = node;
          readers[byte].clear();
        }
      }
    }
    const auto found = graph::edges(b.graph);
    ASSERT_EQ(found, std::vector<Edge>(expected.begin(), expected.end())) << "round " << round;
    total += found.size();
  }
  EXPECT_GT(total, 5000U);
}

// What a step leaves in memory when every operator is another mixture of all that it reads.
std::map<Byte, uint64_t> run(const graph::Graph& graph, const std::vector<uint32_t>& order) {
  std::map<Byte, uint64_t> memory;
  for (const uint32_t node : order) {
    const auto uses = graph::uses(graph, graph.nodes[node]);
    base::Hasher hasher;
    hasher.add(uint64_t{node});
    for (const graph::Use& use : uses) {
      if (!use.reads) continue;
      for (const Byte& byte : bytes_of(graph, use)) hasher.add(memory[byte]);
    }
    const uint64_t mixture = hasher.finish().lo;
    uint64_t place = 0;
    for (const graph::Use& use : uses) {
      if (!use.writes) continue;
      for (const Byte& byte : bytes_of(graph, use)) memory[byte] = mixture + ++place;
    }
  }
  return memory;
}

TEST(Edges, AnyOrderThatKeepsThemHasTheSameResult) {
  std::mt19937 random(2);
  size_t reordered = 0;
  for (int round = 0; round < 500; ++round) {
    const GraphBuilder b = random_graph(random);
    const auto n = static_cast<uint32_t>(b.graph.nodes.size());
    const std::vector<Edge> edges = graph::edges(b.graph);
    std::vector<uint32_t> waits_for(n, 0);
    for (const Edge& edge : edges) {
      ASSERT_LT(edge.from, edge.to);
      ++waits_for[edge.to];
    }
    std::vector<uint32_t> program(n);
    std::vector<uint32_t> order;
    std::vector<uint32_t> ready;
    for (uint32_t node = 0; node < n; ++node) {
      program[node] = node;
      if (waits_for[node] == 0) ready.push_back(node);
    }
    while (!ready.empty()) {
      std::swap(ready[random() % ready.size()], ready.back());
      const uint32_t node = ready.back();
      ready.pop_back();
      order.push_back(node);
      for (const Edge& edge : edges) {
        if (edge.from == node && --waits_for[edge.to] == 0) ready.push_back(edge.to);
      }
    }
    ASSERT_EQ(order.size(), n);
    reordered += order != program ? 1 : 0;
    ASSERT_EQ(run(b.graph, order), run(b.graph, program)) << "round " << round;
  }
  EXPECT_GT(reordered, 100U);
}

}  // namespace
}  // namespace acc
