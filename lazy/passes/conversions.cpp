#include "lazy/passes/conversions.h"

#include <vector>

#include "lazy/graph/words.h"

namespace acc::passes {

uint32_t add_buffer(graph::Graph* out, uint64_t bytes) {
  const auto index = static_cast<uint32_t>(out->buffers.size());
  out->buffers.push_back({graph::BufferKind::kFresh, bytes, index, 0, true});
  return index;
}

void put_copy(graph::Graph* out, const graph::Op* copy, const graph::Node& by,
              std::span<const int64_t> to, std::span<const int64_t> from) {
  // copy_(self, src, non_blocking)
  std::vector<int64_t> words(to.begin(), to.end());
  words.insert(words.end(), from.begin(), from.end());
  words.push_back(graph::make_tag(graph::Tag::kBool));
  words.push_back(0);
  graph::Node node;
  node.op = copy;
  node.outputs = node.end = static_cast<uint32_t>(words.size());
  node.source = by.source;
  node.origin = by.origin;
  node.ambient = by.ambient;
  node.values = by.values;
  out->append(node, words);
  out->buffers[static_cast<size_t>(to[1])].written = true;
}

}  // namespace acc::passes
