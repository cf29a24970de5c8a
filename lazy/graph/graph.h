#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "csrc/base/hash.h"
#include "lazy/graph/op.h"

// A recorded step as pure data: nodes over buffers, in program order.
//
// Everything that identifies a node's call is one run of 64-bit words (see words.h): operands with
// their geometry, structural arguments, and the geometry of fresh results. Numbers that change from
// run to run are not in it; they live in a value block, in the order in which the words name them.
// Two steps are the same plan exactly when their words, operators and buffers are equal.
namespace acc::graph {

// In place of the number of a node or a buffer: none.
inline constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();

enum class BufferKind : uint8_t {
  kInput,  // had memory when the step first touched it
  kFresh,  // had none: made by this step, or never written before it
  kHost,   // a snapshot of a CPU tensor
};

struct Buffer {
  BufferKind kind = BufferKind::kFresh;
  uint64_t nbytes = 0;       // of fresh buffers; 0 for the others, which may grow between runs
  uint32_t group = 0;        // the first buffer of the same storage; itself when there is none
  int64_t group_offset = 0;  // bytes from the group's first buffer; kept only for written groups
  bool written = false;      // some node writes it (for a group: any of its buffers)

  bool operator==(const Buffer&) const = default;
};

struct Node {
  const Op* op = nullptr;
  uint32_t words = 0;    // begin of its words
  uint32_t outputs = 0;  // begin of the words of its fresh results
  uint32_t end = 0;      // end of its words
  uint32_t values = 0;   // begin of its values in the step's value block
  uint32_t n_values = 0;
  uint32_t source = 0;   // where the user's program recorded it; not part of the identity
  uint32_t origin = 0;   // its place in the recording, which passes keep; not part of the identity
  bool again = false;    // computes a value once more (lazy/passes/recompute.h)
  bool seen = false;     // which others saw in memory, where it was rounded
  uint64_t ambient = 0;  // process-wide settings in force (see csrc/runtime/ambient.h)
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<int64_t> words;
  std::vector<Buffer> buffers;

  std::span<const int64_t> arguments(const Node& node) const {
    return {words.data() + node.words, node.outputs - node.words};
  }
  std::span<const int64_t> results(const Node& node) const {
    return {words.data() + node.outputs, node.end - node.outputs};
  }
  // Adds a node whose words are in `from`.
  void append(Node node, const std::vector<int64_t>& from) {
    const auto begin = static_cast<uint32_t>(words.size());
    words.insert(words.end(), from.begin() + node.words, from.begin() + node.end);
    node.outputs = begin + (node.outputs - node.words);
    node.end = begin + (node.end - node.words);
    node.words = begin;
    nodes.push_back(node);
  }
  void clear() {
    nodes.clear();
    words.clear();
    buffers.clear();
  }
  // Gives back the room to grow, of a graph that is complete and will be kept.
  void shrink_to_fit() {
    nodes.shrink_to_fit();
    words.shrink_to_fit();
    buffers.shrink_to_fit();
  }
  uint64_t bytes() const {
    return nodes.capacity() * sizeof(Node) + words.capacity() * sizeof(int64_t) +
           buffers.capacity() * sizeof(Buffer);
  }
};

// The plan's key. Stable over processes and machines.
base::Hash128 hash(const Graph& graph);

// The full comparison behind the key: everything but the source lines.
bool same(const Graph& a, const Graph& b);

// How a node touches a buffer.
struct Use {
  uint32_t buffer = 0;
  bool reads = false;
  bool writes = false;
  bool fresh = false;      // a result of the node: its whole buffer is written, nothing is read
  int64_t first_byte = 0;  // the byte range within the buffer
  int64_t end_byte = 0;
};

// The group of processes that a node which communicates does so with, by its number.
int64_t exchange_group(const Graph& graph, const Node& node);

// The number of the transfer that a node begins or waits for: the last argument of both.
int64_t transfer_ticket(const Graph& graph, const Node& node);

// The uses of one node, arguments first, then results. A buffer that occurs twice is listed twice.
std::vector<Use> uses(const Graph& graph, const Node& node);

}  // namespace acc::graph
