#pragma once

#include <cstdint>
#include <string>

// Where in the user's program an operator was recorded: small numbers for (file, line, function).
namespace acc::record {

// The number of a place; 0 stands for an unknown one. Numbers are never reused.
uint32_t intern_source(const std::string& file, int line, const std::string& function);

struct Source {
  std::string file;  // "" for an unknown place, "backward" for a node of autograd
  int line = 0;
  std::string function;  // of autograd, the node's name
};
Source source_of(uint32_t source);

// " at file:line in function", or "" for 0.
std::string source_text(uint32_t source);

}  // namespace acc::record
