#include "lazy/exec/interpreter.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Half.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/check.h"
#include "lazy/exec/run.h"
#include "lazy/graph/words.h"

namespace acc::exec {

using graph::Tag;

bool is_small_float(uint8_t dtype) {
  const auto type = static_cast<c10::ScalarType>(dtype);
  return type == c10::kFloat || type == c10::kHalf || type == c10::kBFloat16;
}

graph::Graph in_float64(graph::Graph graph) {
  constexpr auto kDouble = static_cast<uint8_t>(c10::kDouble);
  constexpr uint64_t kMost = sizeof(double) / sizeof(c10::Half);
  for (graph::Buffer& buffer : graph.buffers) buffer.nbytes *= kMost;
  for (const graph::Node& node : graph.nodes) {
    int64_t* const begin = graph.words.data() + node.words;
    graph::for_each_tensor(begin, graph.words.data() + node.end, [](int64_t* word) {
      if (!is_small_float(graph::dtype_of(*word))) return;
      *word =
          graph::make_tag(Tag::kTensor, kDouble, graph::flags_of(*word), graph::count_of(*word));
    });
    int64_t* word = begin;
    for (const graph::Argument& argument : node.op->arguments) {
      const bool given = graph::tag_of(*word) == Tag::kInt && graph::item_values(word) == 0;
      if (argument.is_type && given && is_small_float(static_cast<uint8_t>(word[1]))) {
        word[1] = kDouble;
      }
      word += graph::item_words(word);
    }
  }
  return graph;
}

Interpreter::Interpreter(const graph::Graph& graph) : graph_(graph), memory_(graph.buffers.size()) {
  slots_.reserve(memory_.size());
  for (size_t i = 0; i < memory_.size(); ++i) slots_.push_back(library::make_slot(c10::kCPU));
}

void Interpreter::own(uint32_t buffer, c10::Storage memory, int64_t byte_offset) {
  const auto offset = static_cast<size_t>(byte_offset);
  library::point(slots_[buffer], static_cast<char*>(memory.mutable_data()) + offset,
                 memory.nbytes() - std::min(offset, memory.nbytes()));
  memory_[buffer] = std::move(memory);
}

void Interpreter::give(uint32_t buffer, const at::Tensor& contents, int64_t byte_offset) {
  own(buffer, contents.storage(), byte_offset);
}

at::Tensor Interpreter::tensor(const int64_t* word) {
  const auto buffer = static_cast<uint32_t>(word[1]);
  const graph::TensorWords geometry = graph::read_tensor(word);
  if (!has(buffer)) {  // has no contents yet
    int64_t elements = geometry.offset + 1;
    for (size_t d = 0; d < geometry.sizes.size(); ++d) {
      elements += std::max<int64_t>(geometry.sizes[d] - 1, 0) * geometry.strides[d];
    }
    const uint64_t bytes =
        std::max(static_cast<uint64_t>(elements) * graph::element_bytes(geometry.dtype),
                 graph_.buffers[buffer].nbytes);
    at::Tensor made = at::detail::empty_cpu({static_cast<int64_t>(bytes)}, c10::kByte);
    std::memset(made.mutable_data_ptr(), 0, bytes);
    own(buffer, made.storage());
  }
  return library::alias(word, slots_[buffer]);
}

void Interpreter::run(const graph::Node& node, std::span<const int64_t> values) {
  const int64_t* const begin = graph_.words.data() + node.words;
  graph::for_each_tensor(begin, graph_.words.data() + node.outputs,
                         [this](const int64_t* word) { tensor(word); });
  const library::AtenCall call(graph_, node, slots_, c10::kCPU, /*into=*/false);
  const torch::jit::Stack stack = call.run(values);
  for (const Result& result : results_of(graph_, node)) {
    const at::Tensor& made = result.of(stack);
    if (!made.defined()) continue;
    const graph::TensorWords promised = graph::read_tensor(result.word);
    const bool workspace =
        c10::multiply_integers(promised.sizes.begin(), promised.sizes.end()) == 0;
    if (workspace) {
      // Promised empty: only its kernel knows how large it is.
      own(promised.buffer, made.storage());
    } else {
      tensor(result.word).copy_(made);
    }
  }
}

}  // namespace acc::exec
