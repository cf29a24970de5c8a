#pragma once

#include "kernels/codegen/writer.h"

namespace acc::codegen {

// Writes the text of a host kernel: what elementwise kernels and reductions have in common. Values
// are vectors; `at` counts elements.
class HostWriter : protected Writer {
 protected:
  // `vectors`: how many one turn of a loop computes on.
  explicit HostWriter(const KernelSpec& kernel, size_t vectors = 1)
      : Writer(kernel), vectors_(vectors) {}

  KernelText finish() const;

  // A position's definition in a row, and what it is `at` elements further.
  void open_position(size_t position, const std::string& begin);
  void move_position(size_t position);
  // The steps of strided operands along the vectors' loop.
  void add_steps();
  std::string step_of(size_t operand) const;

  // Words for all elements of a turn, whose loop is about to compute on them.
  void draw_ahead();

  // Elements of one turn, and where among them the vector begins that is being written.
  std::string turn() const;
  std::string place() const;

  std::string value(size_t i) const override;
  std::string load(size_t operand) const override;
  std::string count(size_t position) const override;
  std::string drawn(size_t instruction) const override;
  // A vector of what is drawn, from an index on in steps.
  std::string draw_here(size_t instruction, const std::string& first,
                        const std::string& step) const;
  std::string name_of(graph::Fn fn, uint8_t type) const override;
  void add_store(const Store& store);

  const size_t vectors_;
  bool draws_ahead_ = false;
  size_t vector_ = 0;  // of the turn, what is being written
};

}  // namespace acc::codegen
