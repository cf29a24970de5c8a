#pragma once

#include <cstdint>
#include <string>

// Where in the user's program an operator was recorded, as small numbers.
namespace acc::record {

struct Source {
  std::string file;  // "" for an unknown place
  int line = 0;
  std::string function;
  std::string module;  // "Net.layers.0", where a profiler asked for it; "" outside of modules
  std::string node;    // of autograd, that ran

  bool operator==(const Source&) const = default;
  auto operator<=>(const Source&) const = default;
};

// The number of a place; 0 stands for an unknown one. Numbers are never reused.
uint32_t intern_source(Source source);
Source source_of(uint32_t source);

// " at file:line in function", " at file:line in function, AddmmBackward0", " at the backward of
// AddmmBackward0", or "" for 0. Who leaves the place out of a text cuts it at " at ".
std::string source_text(uint32_t source);

// "net.py:12 in forward [Net.layers.0], AddmmBackward0" as far as it is known, "backward of
// AddmmBackward0", or "" for 0.
std::string short_source_text(uint32_t source);

}  // namespace acc::record
