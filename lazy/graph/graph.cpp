#include "lazy/graph/graph.h"

#include <cstring>

#include "csrc/base/check.h"
#include "lazy/graph/words.h"

namespace acc::graph {

base::Hash128 hash(const Graph& graph) {
  base::Hasher hasher;
  for (const Node& node : graph.nodes) {
    hasher.add(node.op->id);
    hasher.add(node.ambient);
    hasher.add(graph.words.data() + node.words, node.end - node.words);
  }
  for (const Buffer& buffer : graph.buffers) {
    hasher.add(static_cast<uint64_t>(buffer.kind) << 1 | (buffer.written ? 1U : 0U));
    hasher.add(buffer.nbytes);
    hasher.add(buffer.group);
    hasher.add(buffer.group_offset);
  }
  return hasher.finish();
}

bool same(const Graph& a, const Graph& b) {
  if (a.nodes.size() != b.nodes.size() || a.words.size() != b.words.size() ||
      a.buffers != b.buffers) {
    return false;
  }
  for (size_t i = 0; i < a.nodes.size(); ++i) {
    const Node& x = a.nodes[i];
    const Node& y = b.nodes[i];
    if (x.op != y.op || x.ambient != y.ambient || x.words != y.words || x.outputs != y.outputs ||
        x.end != y.end) {
      return false;
    }
  }
  return a.words == b.words;
}

namespace {

void add_use(const int64_t* word, bool writes, bool fresh, std::vector<Use>* out) {
  const TensorWords tensor = read_tensor(word);
  const int64_t size = element_bytes(tensor.dtype);
  int64_t low = tensor.offset;
  int64_t high = tensor.offset;
  bool empty = false;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] == 0) empty = true;
    const int64_t reach = (tensor.sizes[d] - 1) * tensor.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  Use use;
  use.buffer = tensor.buffer;
  use.reads = !fresh;
  use.writes = writes || fresh;
  use.fresh = fresh;
  use.first_byte = low * size;
  use.end_byte = empty ? use.first_byte : (high + 1) * size;
  out->push_back(use);
}

void add_uses(const int64_t* word, bool writes, bool fresh, std::vector<Use>* out) {
  switch (tag_of(*word)) {
    case Tag::kTensor:
      add_use(word, writes, fresh, out);
      break;
    case Tag::kList: {
      const int64_t* item = word + 1;
      for (uint32_t i = 0; i < count_of(*word); ++i) {
        add_uses(item, writes, fresh, out);
        item += item_words(item);
      }
      break;
    }
    default:
      break;
  }
}

}  // namespace

int64_t exchange_group(const Graph& graph, const Node& node) {
  // (outputs, inputs, group, options, ticket)
  return items(graph.arguments(node))[2][1];
}

int64_t transfer_ticket(const Graph& graph, const Node& node) {
  return items(graph.arguments(node)).back()[1];
}

std::vector<Use> uses(const Graph& graph, const Node& node) {
  std::vector<Use> out;
  size_t argument = 0;
  for (std::span<const int64_t> rest = graph.arguments(node); !rest.empty();
       rest = rest.subspan(item_words(rest.data())), ++argument) {
    ACC_CHECK(argument < node.op->arguments.size());
    add_uses(rest.data(), node.op->arguments[argument].writes, false, &out);
  }
  for (std::span<const int64_t> rest = graph.results(node); !rest.empty();
       rest = rest.subspan(item_words(rest.data()))) {
    add_uses(rest.data(), false, true, &out);
  }
  return out;
}

}  // namespace acc::graph
