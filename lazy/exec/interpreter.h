#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/library/aten_call.h"
#include "lazy/graph/graph.h"

// Nodes of a graph one by one, by ATen's CPU kernels.
namespace acc::exec {

// The graph with float64 in place of the smaller types of real numbers. Places in memory are
// counted in elements, and stay.
graph::Graph in_float64(graph::Graph graph);
bool is_small_float(uint8_t dtype);

class Interpreter {
 public:
  // `graph` stays while this does.
  explicit Interpreter(const graph::Graph& graph);

  bool has(uint32_t buffer) const { return static_cast<bool>(memory_[buffer]); }
  // The memory of a buffer, which begins `byte_offset` into it and is written in place.
  void give(uint32_t buffer, const at::Tensor& contents, int64_t byte_offset);
  void run(const graph::Node& node, std::span<const int64_t> values);
  // A tensor as a word of the graph has it.
  at::Tensor tensor(const int64_t* word);

 private:
  void own(uint32_t buffer, c10::Storage memory, int64_t byte_offset = 0);

  const graph::Graph& graph_;
  std::vector<library::Slot> slots_;
  std::vector<c10::Storage> memory_;  // of the buffers
};

}  // namespace acc::exec
