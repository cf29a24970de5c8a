#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lazy/graph/graph.h"
#include "lazy/graph/words.h"

// A nest of loops over elements, and how its operands walk through memory.
namespace acc::passes {

inline constexpr uint32_t kNoBuffer = UINT32_MAX;

// Where an operand begins and how far it goes with each turn of each loop.
struct Access {
  uint32_t buffer = 0;  // kNoBuffer: not in memory; its value is how far it went
  uint8_t dtype = 0;
  int64_t offset = 0;            // elements from the begin of the buffer
  std::vector<int64_t> strides;  // elements, per loop; 0: the same element at each turn

  bool operator==(const Access&) const = default;
};

// Loops with the outermost first, and all that is accessed in them. Reductions run over the reduced
// loops; for each turn of the others, which are kept, they have one value.
struct Nest {
  std::vector<int64_t> sizes;
  std::vector<bool> reduced;  // per loop
  std::vector<Access> accesses;

  bool reduces() const;
  int64_t kept_elements() const;  // turns of all kept loops
};

// The number of elements of a tensor, or of turns of nested loops.
int64_t product(std::span<const int64_t> sizes);

// The loops named by `order`, the outermost first; any other has one turn, and goes.
void reorder(Nest& nest, std::span<const size_t> order);

// Drops loops of one turn and puts the loop with the largest stride of `by` outermost.
void sort_loops(Nest& nest, const Access& by);

// Joins neighbouring loops that all accesses walk through as one, kept or reduced both.
void coalesce(Nest& nest);

// Splits the loops of both until they have the same sizes. False, with both unchanged, where the
// boundaries of one cut through the other.
bool refine(Nest& a, Nest& b);

// Puts the reduced loops of `whole` round a nest over its kept elements, which stays where it is in
// them. False, with both unchanged, where the loops of one cut through the other.
bool spread_kept(Nest& kept, Nest& whole);

// The first byte and the byte after the last that an access touches, from the begin of its buffer.
struct ByteRange {
  int64_t begin;
  int64_t end;
};
ByteRange bytes_of(const Access& access, std::span<const int64_t> sizes);

// Whether no element is touched twice.
bool is_injective(const Access& access, std::span<const int64_t> sizes);

}  // namespace acc::passes
