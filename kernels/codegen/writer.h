#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "kernels/codegen/kernel_spec.h"
#include "kernels/codegen/render.h"

namespace acc::codegen {

// The type of values of a type that kernels compute in, in the preamble of a dialect: of a vector
// of them on the host, of one on a GPU. Masks are as wide as float32.
const char* vector_of(uint8_t type);

// Per value, whether it is the same at every turn of the innermost loop.
std::vector<bool> find_uniform(const KernelSpec& kernel);

// Writes the text of a kernel: what the dialects have in common. Value i is called v<i>, operand i
// is at p<i> and goes on in steps of s<i> where it is strided, position i is at q<i> and goes on in
// steps of t<i>. The functions that expressions call are those of the dialects' preambles.
class Writer {
 public:
  virtual ~Writer() = default;

 protected:
  explicit Writer(const KernelSpec& kernel);

  template <class... Parts>
  void line(const Parts&... parts) {
    body_ += base::concat(parts..., "\n");
  }
  // The function of all that was written, named after it; `head` and `tail` stand around its name.
  KernelText finish(const char* head, const char* tail) const;

  size_t loops() const { return kernel_.loops; }
  std::string stride(size_t operand, size_t loop) const;
  // Where an operand begins when the loops from `first` to before `last` have turned to i<loop>;
  // the same of a position.
  std::string offset(size_t operand, size_t first, size_t last) const;
  std::string position_offset(size_t position, size_t first, size_t last) const;
  const char* element(size_t operand) const;
  bool is_loaded(size_t operand) const;
  // Made of numbers only, none of them reduced.
  bool is_constant(size_t i) const;

  void define(size_t i);
  // What kAmax and kAmin begin with, as a number.
  static std::string neutral(const Instruction& reduction);

  virtual std::string value(size_t i) const;
  virtual std::string load(size_t operand) const = 0;
  virtual std::string count(size_t position) const = 0;
  // Of an instruction that draws.
  virtual std::string drawn(size_t instruction) const = 0;
  // Its seed and its offset; what else it is told, behind a comma.
  std::string stream(size_t instruction) const;
  std::string bound(size_t instruction) const;
  // What the function is called for values of a type.
  virtual std::string name_of(graph::Fn fn, uint8_t type) const = 0;

  const KernelSpec& kernel_;
  const std::vector<bool> uniform_;

 private:
  std::string input(const Instruction& instruction, size_t i) const;
  std::string number(size_t instruction) const;  // of a kScalar
  std::string expression(size_t i) const;

  std::string body_;
};

}  // namespace acc::codegen
