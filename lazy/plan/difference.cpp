#include "lazy/plan/difference.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/graph/print.h"
#include "lazy/graph/words.h"

namespace acc::plan {
namespace {

using base::concat;
using graph::Graph;
using graph::Node;
using graph::Tag;

constexpr size_t kMostMore = 64;  // operators that were put in or left out in one place
constexpr size_t kAgain = 3;      // equal ones behind them, to be sure

std::string text(std::span<const int64_t> ints) {
  std::string made = "[";
  for (const int64_t each : ints) made += concat(made.size() == 1 ? "" : ", ", each);
  return made + "]";
}

const char* kind_of(int64_t tag) {
  switch (graph::tag_of(tag)) {
    case Tag::kTensor:
      return "a tensor";
    case Tag::kUndefined:
      return "no tensor";
    case Tag::kNumber:
      return "a number";
    case Tag::kInt:
      return "an int";
    case Tag::kFloat:
      return "a float";
    case Tag::kBool:
      return "a bool";
    case Tag::kComplex:
      return "a complex number";
    case Tag::kList:
      return "a list";
    case Tag::kString:
      return "a string";
    case Tag::kDevice:
      return "a device";
    case Tag::kNone:
      break;
  }
  return "None";
}

// A name of the element type that PyTorch's users know.
std::string dtype_text(int64_t tag) {
  const std::string name = graph::dtype_name(graph::dtype_of(tag));
  if (name == "bf16") return "bfloat16";
  if (name == "bool" || name.size() < 2) return name;
  const std::string bits = name.substr(1);
  switch (name[0]) {
    case 'f':
      return "float" + bits;
    case 'i':
      return "int" + bits;
    case 'u':
      return "uint" + bits;
    case 'c':
      return "complex" + bits;
    default:
      return name;
  }
}

bool all_numbers(const int64_t* list) {
  const int64_t* item = list + 1;
  for (uint32_t i = 0; i < graph::count_of(*list); ++i, item += graph::item_words(item)) {
    const Tag tag = graph::tag_of(*item);
    if (tag == Tag::kTensor || tag == Tag::kUndefined || tag == Tag::kList) return false;
  }
  return true;
}

class Comparison {
 public:
  Comparison(const Graph& before, const Graph& now) : before_(before), now_(now) {}

  Difference run() {
    const size_t both = std::min(before_.nodes.size(), now_.nodes.size());
    for (size_t i = 0; i < both; ++i) {
      if (!same_node(i)) return std::move(found_);
    }
    if (before_.nodes.size() != now_.nodes.size()) return length(both);
    // What only later nodes tell of a buffer: that it is written, and how its views lie then.
    for (size_t i = 0; i < both; ++i) {
      if (!same_writes(i)) break;
    }
    return std::move(found_);
  }

 private:
  const Node& node(size_t i) const { return now_.nodes[i]; }

  bool differs(Change change, size_t i, std::string aspect, std::string before, std::string after) {
    found_.change = change;
    found_.node = i;
    found_.op = node(i).op->name;
    found_.source = node(i).source;
    found_.aspect = std::move(aspect);
    found_.before = std::move(before);
    found_.after = std::move(after);
    return false;
  }

  bool same_node(size_t i) {
    const Node& x = before_.nodes[i];
    const Node& y = node(i);
    if (x.op != y.op) return operators(i);
    if (x.ambient != y.ambient) {
      found_.ambient_before = x.ambient;
      found_.ambient_after = y.ambient;
      return differs(Change::kSetting, i, "settings", "", "");
    }
    return same_items(i, before_.arguments(x), now_.arguments(y), /*results=*/false) &&
           same_items(i, before_.results(x), now_.results(y), /*results=*/true);
  }

  // Whether what `x` has from `i` on goes on as `y` does from `j` on.
  static bool goes_on(const Graph& x, size_t i, const Graph& y, size_t j) {
    for (size_t k = 0; k < kAgain; ++k) {
      if (i + k >= x.nodes.size() || j + k >= y.nodes.size()) {
        return i + k >= x.nodes.size() && j + k >= y.nodes.size();
      }
      if (x.nodes[i + k].op != y.nodes[j + k].op) return false;
    }
    return true;
  }

  bool operators(size_t i) {
    const std::string was = before_.nodes[i].op->name;
    const std::string is = node(i).op->name;
    for (size_t more = 1; more <= kMostMore; ++more) {
      if (goes_on(before_, i, now_, i + more)) {
        return differs(Change::kOperator, i,
                       concat(more, more == 1 ? " operator" : " operators", " more"), was, is);
      }
      if (goes_on(before_, i + more, now_, i)) {
        return differs(Change::kOperator, i,
                       concat(more, more == 1 ? " operator" : " operators", " fewer"), was, is);
      }
    }
    return differs(Change::kOperator, i, std::string(kAnotherOperator), was, is);
  }

  Difference length(size_t both) {
    const bool longer = now_.nodes.size() > both;
    const size_t more = std::max(before_.nodes.size(), now_.nodes.size()) - both;
    const std::string count = concat(more, more == 1 ? " operator" : " operators");
    if (now_.nodes.empty()) return {};
    if (longer) {
      differs(Change::kLonger, both, count + " more", "the end", node(both).op->name);
    } else {
      differs(Change::kShorter, both - 1, count + " fewer", before_.nodes[both].op->name,
              "the end");
    }
    found_.node = both;
    return std::move(found_);
  }

  bool same_items(size_t i, std::span<const int64_t> x, std::span<const int64_t> y, bool results) {
    const std::vector<const int64_t*> was = graph::items(x);
    const std::vector<const int64_t*> is = graph::items(y);
    for (size_t k = 0; k < std::min(was.size(), is.size()); ++k) {
      const auto& arguments = node(i).op->arguments;
      found_.argument = results ? "a result" : k < arguments.size() ? arguments[k].name : "";
      if (!same_item(i, was[k], is[k])) return false;
    }
    found_.argument.clear();
    return was.size() == is.size() ||
           differs(Change::kArgument, i, "number of results", std::to_string(was.size()),
                   std::to_string(is.size()));
  }

  bool same_item(size_t i, const int64_t* x, const int64_t* y) {
    if (graph::tag_of(*x) != graph::tag_of(*y)) {
      return differs(Change::kArgument, i, "type", kind_of(*x), kind_of(*y));
    }
    switch (graph::tag_of(*x)) {
      case Tag::kTensor:
        return same_tensor(i, x, y);
      case Tag::kList:
        return same_list(i, x, y);
      case Tag::kNumber:
        if (graph::dtype_of(*x) != graph::dtype_of(*y)) {
          return differs(Change::kArgument, i, "dtype", dtype_text(*x), dtype_text(*y));
        }
        break;
      default:
        break;
    }
    const uint32_t words = graph::item_words(x);
    if (*x == *y && std::memcmp(x, y, words * sizeof(int64_t)) == 0) return true;
    const auto value = [](const int64_t* word) {
      const bool changes = (graph::flags_of(*word) & graph::kValueFlag) != 0;
      return changes ? std::string("a number that may change") : graph::print(word);
    };
    return differs(Change::kArgument, i, "value", value(x), value(y));
  }

  bool same_list(size_t i, const int64_t* x, const int64_t* y) {
    const uint32_t count = graph::count_of(*x);
    if (all_numbers(x) && all_numbers(y)) {
      const uint32_t words = graph::item_words(x);
      if (words == graph::item_words(y) && std::memcmp(x, y, words * sizeof(int64_t)) == 0) {
        return true;
      }
      return differs(Change::kArgument, i, "value", graph::print(x), graph::print(y));
    }
    if (count != graph::count_of(*y)) {
      return differs(Change::kArgument, i, "length", std::to_string(count),
                     std::to_string(graph::count_of(*y)));
    }
    const std::string name = found_.argument;
    ++x;
    ++y;
    for (uint32_t k = 0; k < count; ++k) {
      found_.argument = concat(name, "[", k, "]");
      if (!same_item(i, x, y)) return false;
      x += graph::item_words(x);
      y += graph::item_words(y);
    }
    found_.argument = name;
    return true;
  }

  bool same_tensor(size_t i, const int64_t* x, const int64_t* y) {
    if (graph::dtype_of(*x) != graph::dtype_of(*y)) {
      return differs(Change::kArgument, i, "dtype", dtype_text(*x), dtype_text(*y));
    }
    const graph::TensorWords was = graph::read_tensor(x);
    const graph::TensorWords is = graph::read_tensor(y);
    if (!std::ranges::equal(was.sizes, is.sizes)) {
      return differs(Change::kArgument, i, "shape", text(was.sizes), text(is.sizes));
    }
    if (!std::ranges::equal(was.strides, is.strides)) {
      return differs(Change::kArgument, i, "strides", text(was.strides), text(is.strides));
    }
    if (was.flags != is.flags) {
      return differs(Change::kArgument, i, "lazy conjugation or negation", graph::print(x),
                     graph::print(y));
    }
    if (was.offset != is.offset) {
      return differs(Change::kArgument, i, "offset", std::to_string(was.offset),
                     std::to_string(is.offset));
    }
    return same_memory(i, was.buffer, is.buffer);
  }

  bool same_memory(size_t i, uint32_t x, uint32_t y) {
    const graph::Buffer& was = before_.buffers[x];
    const graph::Buffer& is = now_.buffers[y];
    if (x != y) {
      return differs(Change::kMemory, i, "memory", origin(before_, x, i), origin(now_, y, i));
    }
    if (was.kind != is.kind) {
      const auto kind = [](graph::BufferKind of) {
        return of == graph::BufferKind::kInput   ? "had contents before the step"
               : of == graph::BufferKind::kFresh ? "had none"
                                                 : "was on the CPU";
      };
      return differs(Change::kMemory, i, "memory", kind(was.kind), kind(is.kind));
    }
    if (was.nbytes != is.nbytes) {
      return differs(Change::kMemory, i, "bytes of its memory", std::to_string(was.nbytes),
                     std::to_string(is.nbytes));
    }
    if (was.group != is.group) {
      return differs(Change::kMemory, i, "memory", origin(before_, was.group, i),
                     origin(now_, is.group, i));
    }
    return true;
  }

  bool same_writes(size_t i) {
    for (const graph::Use& use : graph::uses(now_, node(i))) {
      const graph::Buffer& was = before_.buffers[use.buffer];
      const graph::Buffer& is = now_.buffers[use.buffer];
      if (was.written != is.written) {
        const auto written = [](bool yes) { return yes ? "written later" : "only read"; };
        return differs(Change::kMemory, i, "memory", written(was.written), written(is.written));
      }
      if (was.group_offset != is.group_offset) {
        return differs(Change::kMemory, i, "bytes behind another view of the same storage",
                       std::to_string(was.group_offset), std::to_string(is.group_offset));
      }
    }
    return true;
  }

  // Where the memory of a buffer comes from, seen by operator `i`.
  static std::string origin(const Graph& graph, uint32_t buffer, size_t i) {
    for (size_t k = 0; k < i; ++k) {
      for (const graph::Use& use : graph::uses(graph, graph.nodes[k])) {
        if (use.buffer != buffer) continue;
        return concat(use.fresh ? "made by " : "used before by ", graph.nodes[k].op->name,
                      " (operator ", k + 1, ")");
      }
    }
    return "used by no operator before";
  }

  const Graph& before_;
  const Graph& now_;
  Difference found_;
};

}  // namespace

size_t common_operators(const Graph& a, const Graph& b) {
  const size_t both = std::min(a.nodes.size(), b.nodes.size());
  size_t i = 0;
  while (i < both && a.nodes[i].op == b.nodes[i].op) ++i;
  return i;
}

Difference difference(const Graph& before, const Graph& now) {
  return Comparison(before, now).run();
}

}  // namespace acc::plan
