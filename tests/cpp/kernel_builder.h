#pragma once

#include <gtest/gtest.h>

#include "kernels/codegen/kernel_spec.h"
#include "kernels/codegen/render.h"
#include "kernels/jit/compile.h"
#include "lazy/graph/dtype.h"

// Builds kernels by hand for the tests of the renderer, and compiles them.
namespace acc::testing {

inline codegen::Instruction operand(uint32_t index, uint8_t type = graph::dtype::kF32) {
  return {.fn = graph::Fn::kOperand, .dtype = type, .index = index};
}

inline codegen::Instruction apply(graph::Fn fn, uint8_t type, uint32_t a, uint32_t b = 0,
                                  uint32_t c = 0) {
  return {.fn = fn, .dtype = type, .inputs = {a, b, c}};
}

inline codegen::Instruction constant(double number, uint8_t type = graph::dtype::kF32) {
  return {.fn = graph::Fn::kConstant, .dtype = type, .constant = number};
}

inline codegen::Instruction scalar(uint32_t index, uint8_t type = graph::dtype::kF32) {
  return {.fn = graph::Fn::kScalar, .dtype = type, .index = index};
}

inline codegen::Instruction position(uint32_t index) {
  return {.fn = graph::Fn::kPosition, .dtype = graph::dtype::kF32, .index = index};
}

inline codegen::HostFunction compiled(const codegen::KernelSpec& kernel) {
  const codegen::KernelText text = codegen::render_host(kernel);
  const auto job = jit::compile(codegen::host_preamble(), {{text.name, text.text}});
  job->wait();
  EXPECT_EQ(job->error(), "");
  return reinterpret_cast<codegen::HostFunction>(job->function(text.name));
}

// y = x * k + 1
inline codegen::KernelSpec scale() {
  codegen::KernelSpec kernel;
  kernel.operands = {{graph::dtype::kF32, codegen::Walk::kContiguous, false},
                     {graph::dtype::kF32, codegen::Walk::kContiguous, true}};
  kernel.scalars = {true};
  kernel.instructions = {operand(0), scalar(0), apply(graph::Fn::kMul, graph::dtype::kF32, 0, 1),
                         constant(1), apply(graph::Fn::kAdd, graph::dtype::kF32, 2, 3)};
  kernel.stores = {{1, 4}};
  return kernel;
}

// out[i, j] = a[i, j] + row[j] * column[i] - t[j, i]
inline codegen::KernelSpec broadcast_and_strided() {
  constexpr uint8_t kF32 = graph::dtype::kF32;
  codegen::KernelSpec kernel;
  kernel.loops = 2;
  kernel.operands = {{kF32, codegen::Walk::kContiguous, false},
                     {kF32, codegen::Walk::kContiguous, false},
                     {kF32, codegen::Walk::kBroadcast, false},
                     {kF32, codegen::Walk::kStrided, false},
                     {kF32, codegen::Walk::kStrided, true}};
  kernel.instructions = {operand(0),
                         operand(1),
                         operand(2),
                         apply(graph::Fn::kMul, kF32, 1, 2),
                         apply(graph::Fn::kAdd, kF32, 0, 3),
                         operand(3),
                         apply(graph::Fn::kSub, kF32, 4, 5)};
  kernel.stores = {{4, 6}};
  return kernel;
}

// out[kept] = what `fn` makes of a row of x, or of a column.
inline codegen::KernelSpec reduction(graph::Fn fn, bool columns) {
  codegen::KernelSpec kernel;
  kernel.loops = 2;
  kernel.reduced = 1;
  kernel.columns = columns;
  kernel.operands = {
      {graph::dtype::kF32, codegen::Walk::kContiguous, false, false},
      {graph::dtype::kF32, columns ? codegen::Walk::kContiguous : codegen::Walk::kBroadcast, true,
       true}};
  kernel.instructions = {operand(0), apply(fn, graph::dtype::kF32, 0)};
  kernel.stores = {{1, 1}};
  return kernel;
}

// out = exp(x - max(x)) / sum(exp(x - max(x))), largest = max(x), for rows of x or columns.
inline codegen::KernelSpec softmax(bool columns) {
  constexpr uint8_t kF32 = graph::dtype::kF32;
  codegen::KernelSpec kernel = reduction(graph::Fn::kAmax, columns);
  kernel.operands.insert(kernel.operands.begin() + 1,
                         {kF32, codegen::Walk::kContiguous, true, false});
  kernel.instructions = {operand(0),
                         apply(graph::Fn::kAmax, kF32, 0),
                         apply(graph::Fn::kSub, kF32, 0, 1),
                         apply(graph::Fn::kExp, kF32, 2),
                         apply(graph::Fn::kSum, kF32, 3),
                         apply(graph::Fn::kDiv, kF32, 3, 4)};
  kernel.stores = {{1, 5}, {2, 1}};
  return kernel;
}

}  // namespace acc::testing
