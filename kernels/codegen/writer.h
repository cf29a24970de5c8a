#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "kernels/codegen/kernel_spec.h"
#include "kernels/codegen/render.h"

namespace acc::codegen {

// The vector type of values of a type that kernels compute in; masks are as wide as float32.
const char* vector_of(uint8_t type);

// Per value, whether it is the same at every turn of the innermost loop.
std::vector<bool> find_uniform(const KernelSpec& kernel);

// Writes the text of a host kernel: what elementwise kernels and reductions have in common. Value i
// is called v<i>, operand i is at p<i> and goes on in steps of s<i> where it is strided; `at`
// counts elements.
class HostWriter {
 protected:
  // `vectors`: how many one turn of a loop computes on.
  explicit HostWriter(const KernelSpec& kernel, size_t vectors = 1);

  // The function of all that was written.
  KernelText finish() const;

  template <class... Parts>
  void line(const Parts&... parts) {
    body_ += base::concat(parts..., "\n");
  }

  size_t loops() const { return kernel_.loops; }
  std::string stride(size_t operand, size_t loop) const;
  // Where an operand begins when the loops from `first` to before `last` have turned to i<loop>.
  std::string offset(size_t operand, size_t first, size_t last) const;
  // The same of a position, which is at q<i> and goes on in steps of t<i>: how far the loops moved
  // it, its definition in a row, and what it is `at` elements further.
  std::string position_offset(size_t position, size_t first, size_t last) const;
  void open_position(size_t position, const std::string& begin);
  void move_position(size_t position);
  const char* element(size_t operand) const;
  // The steps of strided operands along the vectors' loop.
  void add_steps();
  std::string step_of(size_t operand) const;
  bool is_loaded(size_t operand) const;

  // Elements of one turn, and where among them the vector begins that is being written.
  std::string turn() const;
  std::string place() const;
  std::string value(size_t i) const;

  void define(size_t i);
  std::string load(size_t operand) const;
  void add_store(const Store& store);

  const KernelSpec& kernel_;
  const std::vector<bool> uniform_;
  const size_t vectors_;
  size_t vector_ = 0;  // of the turn, what is being written

 private:
  std::string input(const Instruction& instruction, size_t i) const;
  std::string expression(const Instruction& instruction) const;

  std::string body_;
};

}  // namespace acc::codegen
