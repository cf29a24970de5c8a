#pragma once

#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include "lazy/graph/dtype.h"
#include "lazy/graph/graph.h"
#include "lazy/graph/print.h"
#include "lazy/graph/words.h"

// Builds small graphs by hand for the tests of passes and plans.
namespace acc::testing {

// The lines of a graph.
inline std::vector<std::string> lines_of(const graph::Graph& graph) {
  std::vector<std::string> lines;
  for (const graph::Node& node : graph.nodes) lines.push_back(graph::print(graph, node));
  return lines;
}

// A vector of `elements` floats, or of another type, in a buffer, from `offset` on.
struct Vector {
  uint32_t buffer;
  int64_t elements = 4;
  int64_t offset = 0;
  uint8_t dtype = graph::dtype::kF32;
};

class GraphBuilder {
 public:
  graph::Graph graph;

  uint32_t buffer(graph::BufferKind kind, uint64_t nbytes = 16) {
    const auto index = static_cast<uint32_t>(graph.buffers.size());
    graph.buffers.push_back(
        {kind, kind == graph::BufferKind::kFresh ? nbytes : 0, index, 0, false});
    return index;
  }
  uint32_t input() { return buffer(graph::BufferKind::kInput); }
  uint32_t fresh(uint64_t nbytes = 16) { return buffer(graph::BufferKind::kFresh, nbytes); }

  // Another view of the storage behind `of`, `bytes` further on.
  uint32_t input_view(uint32_t of, int64_t bytes) {
    const uint32_t index = input();
    graph.buffers[index].group = graph.buffers[of].group;
    graph.buffers[index].group_offset = bytes;
    return index;
  }

  // reads -> results
  size_t call(const std::string& name, std::initializer_list<Vector> reads,
              std::initializer_list<Vector> results) {
    return add(name, {}, reads, results);
  }
  // writes the first arguments in place
  size_t in_place(const std::string& name, std::initializer_list<Vector> writes,
                  std::initializer_list<Vector> reads = {}) {
    return add(name, writes, reads, {});
  }

  // What `clone`, `to` and `contiguous` are recorded as.
  size_t copy(Vector to, Vector from) {
    const size_t node = in_place("aten::copy_", {to}, {from});
    last_op().arguments[0].name = "self";
    last_op().arguments[1].name = "src";
    last_op().returns.push_back({0, false});
    return node;
  }

  graph::Op& last_op() { return ops_.back(); }

  // The buffers' numbers in a vector of booleans.
  std::vector<bool> alive(std::initializer_list<uint32_t> buffers) const {
    std::vector<bool> made(graph.buffers.size(), false);
    for (const uint32_t buffer : buffers) made[buffer] = true;
    return made;
  }

 private:
  size_t add(const std::string& name, std::initializer_list<Vector> writes,
             std::initializer_list<Vector> reads, std::initializer_list<Vector> results) {
    graph::Op& op = ops_.emplace_back();
    op.name = name;
    base::Hasher hasher;
    hasher.add(std::string_view(name));
    op.id = hasher.finish().lo;
    graph::Node node;
    node.op = &op;
    node.words = static_cast<uint32_t>(graph.words.size());
    for (const Vector& vector : writes) argument(op, vector, true);
    for (const Vector& vector : reads) argument(op, vector, false);
    node.outputs = static_cast<uint32_t>(graph.words.size());
    for (const Vector& vector : results) {
      push(vector);
      op.returns.push_back({});
    }
    node.end = static_cast<uint32_t>(graph.words.size());
    op.writes = writes.size() > 0;
    graph.nodes.push_back(node);
    return graph.nodes.size() - 1;
  }

  void argument(graph::Op& op, const Vector& vector, bool writes) {
    graph::Argument argument;
    argument.writes = writes;
    op.arguments.push_back(argument);
    if (writes) {
      for (graph::Buffer& buffer : graph.buffers) {
        if (buffer.group == graph.buffers[vector.buffer].group) buffer.written = true;
      }
    }
    push(vector);
  }

  void push(const Vector& vector) {
    graph.words.push_back(graph::make_tag(graph::Tag::kTensor, vector.dtype, 0, 1));
    graph.words.push_back(vector.buffer);
    graph.words.push_back(vector.offset);
    graph.words.push_back(vector.elements);
    graph.words.push_back(1);
  }

  std::deque<graph::Op> ops_;
};

}  // namespace acc::testing
