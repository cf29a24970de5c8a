#include "lazy/graph/print.h"

#include <bit>
#include <sstream>

#include "lazy/graph/words.h"

namespace acc::graph {
namespace {

void print_ints(std::span<const int64_t> ints, std::ostream& out) {
  out << '[';
  for (size_t i = 0; i < ints.size(); ++i) out << (i == 0 ? "" : ",") << ints[i];
  out << ']';
}

bool contiguous(const TensorWords& tensor) {
  int64_t expected = 1;
  for (size_t d = tensor.sizes.size(); d-- > 0;) {
    if (tensor.sizes[d] != 1 && tensor.strides[d] != expected) return false;
    expected *= tensor.sizes[d];
  }
  return true;
}

void print_item(const int64_t* word, std::ostream& out) {
  if (flags_of(*word) & kValueFlag) {
    out << '_';
    return;
  }
  switch (tag_of(*word)) {
    case Tag::kNone:
      out << "None";
      break;
    case Tag::kUndefined:
      out << "undefined";
      break;
    case Tag::kDevice:
      out << "device";
      break;
    case Tag::kTensor: {
      const TensorWords tensor = read_tensor(word);
      out << '%' << tensor.buffer << ':' << dtype_name(tensor.dtype);
      print_ints(tensor.sizes, out);
      if (!contiguous(tensor)) {
        out << '/';
        print_ints(tensor.strides, out);
      }
      if (tensor.offset != 0) out << '+' << tensor.offset;
      if (tensor.flags & kConjFlag) out << ".conj";
      if (tensor.flags & kNegFlag) out << ".neg";
      break;
    }
    case Tag::kNumber:
    case Tag::kInt:
      out << word[1];
      break;
    case Tag::kFloat:
      out << std::bit_cast<double>(word[1]);
      break;
    case Tag::kBool:
      out << (word[1] != 0 ? "True" : "False");
      break;
    case Tag::kComplex:
      out << std::bit_cast<double>(word[1]) << '+' << std::bit_cast<double>(word[2]) << 'j';
      break;
    case Tag::kString:
      out << '\'';
      out.write(reinterpret_cast<const char*>(word + 1), count_of(*word));
      out << '\'';
      break;
    case Tag::kList: {
      out << '[';
      const int64_t* item = word + 1;
      for (uint32_t i = 0; i < count_of(*word); ++i) {
        if (i != 0) out << ", ";
        print_item(item, out);
        item += item_words(item);
      }
      out << ']';
      break;
    }
  }
}

void print_items(std::span<const int64_t> rest, std::ostream& out) {
  for (bool first = true; !rest.empty(); rest = rest.subspan(item_words(rest.data()))) {
    if (!first) out << ", ";
    first = false;
    print_item(rest.data(), out);
  }
}

void print_node(const Graph& graph, const Node& node, std::ostream& out) {
  const auto results = graph.results(node);
  if (!results.empty()) {
    print_items(results, out);
    out << " = ";
  }
  out << node.op->name << '(';
  print_items(graph.arguments(node), out);
  out << ')';
}

}  // namespace

std::string print(const Graph& graph) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  for (const Node& node : graph.nodes) {
    print_node(graph, node, out);
    out << '\n';
  }
  return out.str();
}

std::string print(const Graph& graph, const Node& node) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  print_node(graph, node, out);
  return out.str();
}

std::string print(const int64_t* word) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  print_item(word, out);
  return out.str();
}

}  // namespace acc::graph
