#include "lazy/capture/text.h"

#include <algorithm>
#include <bit>

#include "csrc/base/check.h"
#include "lazy/graph/words.h"

namespace acc::capture {
namespace {

using graph::Tag;
using record::FlushReason;

// The tag of value `*index` of the item at `word`; else 0, and `*index` is less by the item's
// values.
int64_t tag_of_value(const int64_t* word, uint32_t* index) {
  if (graph::tag_of(*word) == Tag::kList) {
    const int64_t* item = word + 1;
    for (uint32_t i = 0; i < graph::count_of(*word); ++i, item += graph::item_words(item)) {
      if (const int64_t tag = tag_of_value(item, index)) return tag;
    }
    return 0;
  }
  const uint32_t values = graph::item_values(word);
  if (*index < values) return *word;
  *index -= values;
  return 0;
}

}  // namespace

Number number_of(const graph::Graph& graph, const graph::Node& node, uint32_t index) {
  const int64_t* word = graph.words.data() + node.words;
  for (const graph::Argument& argument : node.op->arguments) {
    if (const int64_t tag = tag_of_value(word, &index)) return {argument.name, tag};
    word += graph::item_words(word);
  }
  return {"?", 0};
}

std::string number_text(const Number& number, int64_t bits) {
  constexpr uint8_t kHalf = 5;
  constexpr uint8_t kComplexDouble = 10;
  constexpr uint8_t kBFloat16 = 15;
  const Tag tag = graph::tag_of(number.tag);
  const uint8_t dtype = graph::dtype_of(number.tag);
  const bool real =
      tag == Tag::kFloat || tag == Tag::kComplex ||
      (tag == Tag::kNumber && ((dtype >= kHalf && dtype <= kComplexDouble) || dtype == kBFloat16));
  if (tag == Tag::kBool) return bits != 0 ? "True" : "False";
  return real ? base::concat(std::bit_cast<double>(bits)) : base::concat(bits);
}

bool same_node(const graph::Graph& a, const graph::Graph& b, size_t index) {
  const graph::Node& left = a.nodes[index];
  const graph::Node& right = b.nodes[index];
  return left.op == right.op && left.ambient == right.ambient &&
         std::ranges::equal(a.arguments(left), b.arguments(right)) &&
         std::ranges::equal(a.results(left), b.results(right));
}

std::string cut_text(const record::Cut& cut) {
  const std::string op = cut.op.empty() ? "an operator" : cut.op;
  switch (cut.reason) {
    case FlushReason::kRead:
      return "reads a tensor on the host (item(), print, a copy to the CPU)";
    case FlushReason::kFallback:
      return base::concat("calls ", op, ", which cannot be recorded");
    case FlushReason::kDataDependent:
      return base::concat("calls ", op, ", whose result has a shape that depends on data");
    case FlushReason::kCap:
      return "records more than may be pending";
    case FlushReason::kEvent:
      return "uses an event or a stream";
    case FlushReason::kResize:
      return "resizes a tensor that has contents";
    case FlushReason::kPointer:
      return "takes the address of a tensor";
    case FlushReason::kLoader:
      return "takes a batch from a loader";
    case FlushReason::kExchange:
      return "exchanges something with other processes at once (send, recv, a group of operations, "
             "collectives of several devices)";
    case FlushReason::kIdle:
      return "recorded nothing for seconds behind a collective that other processes wait for";
    default:
      return "submits work before its end";
  }
}

const char* cut_advice(FlushReason reason) {
  switch (reason) {
    case FlushReason::kRead:
      return ". Return the tensor, and read it outside of the function.";
    case FlushReason::kCap:
      return ". Raise ACC_MAX_PENDING or ACC_MAX_PENDING_MB, or capture parts of the step.";
    case FlushReason::kLoader:
      return ". Take the batch outside, and pass it to the function.";
    case FlushReason::kIdle:
      return ". Wait outside of the function.";
    default:
      return ". Do that outside of the function.";
  }
}

}  // namespace acc::capture
