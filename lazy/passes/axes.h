#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lazy/graph/formula.h"
#include "lazy/graph/graph.h"
#include "lazy/graph/words.h"
#include "lazy/passes/loops.h"

namespace acc::passes {

// The loops of a call with a formula: the dimensions of the tensor that it goes through, which of
// them it reduces, and how the other tensors lie along them (Formula::over, Formula::along).
class Axes {
 public:
  // Nothing where the formula does not fit the arguments, whose words are `items`.
  static std::optional<Axes> find(const graph::Formula& formula, const graph::Op& op,
                                  std::span<const int64_t* const> items,
                                  const graph::TensorWords& whole);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<bool>& reduced() const { return reduced_; }

  // Nothing where the tensor does not lie along the loops.
  std::optional<Access> operand(const graph::TensorWords& tensor) const;

  // Nothing either where elements of the result share memory.
  std::optional<Access> result(const graph::TensorWords& tensor) const;

  // What counts along the second dimension, exactly in float32.
  std::optional<Access> position() const;
  // What counts through all elements, in logical order.
  Access index() const;

 private:
  // A tensor's dimensions, and the loop of each.
  struct Mapping {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    std::vector<size_t> loops;
  };

  explicit Axes(const graph::Formula& formula) : formula_(&formula) {}
  bool find_groups(const graph::Op& op, std::span<const int64_t* const> items);
  bool find_reduced(const graph::Op& op, std::span<const int64_t* const> items);
  void split(Mapping& mapping, size_t dim) const;
  Mapping map(const graph::TensorWords& tensor, bool result) const;
  std::optional<Access> access(const graph::TensorWords& tensor, const Mapping& mapping) const;

  const graph::Formula* formula_;
  std::vector<int64_t> whole_;  // the dimensions themselves
  int64_t groups_ = 0;          // of the second dimension; 0: in none
  std::vector<int64_t> sizes_;
  std::vector<bool> reduced_;
};

}  // namespace acc::passes
