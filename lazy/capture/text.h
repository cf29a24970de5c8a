#pragma once

#include <cstdint>
#include <string>

#include "lazy/graph/graph.h"
#include "lazy/record/watch.h"

// What the errors of a capture say.
namespace acc::capture {

// A number in the value block of a step: of which argument of its operator, and of what kind.
struct Number {
  std::string argument;
  int64_t tag = 0;  // see words.h
};

// `index`: among the node's values.
Number number_of(const graph::Graph& graph, const graph::Node& node, uint32_t index);
std::string number_text(const Number& number, int64_t bits);

// Whether node `index` is the same call in both.
bool same_node(const graph::Graph& a, const graph::Graph& b, size_t index);

// "reads on the host (...)", and what to do about it.
std::string cut_text(const record::Cut& cut);
const char* cut_advice(record::FlushReason reason);

}  // namespace acc::capture
