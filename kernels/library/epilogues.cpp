#include "kernels/library/epilogues.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/le.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

namespace acc::library {
namespace {

using at::Tensor;

// 1, 2, 4, .. 128
Tensor bits_of_byte(const Tensor& like) {
  const at::TensorOptions bytes = like.options().dtype(at::kByte);
  return at::bitwise_left_shift(at::full({}, 1, bytes), at::arange(8, bytes));
}

// (m, n) truths -> (m, n / 8) bytes, the first the lowest bit
Tensor pack(const Tensor& truths) {
  const Tensor bits = truths.view({truths.size(0), -1, 8});
  return at::where(bits, bits_of_byte(truths), at::full({}, 0, truths.options().dtype(at::kByte)))
      .sum(-1, /*keepdim=*/false, at::kByte);
}

Tensor unpack(const Tensor& bytes) {
  return at::bitwise_and(bytes.unsqueeze(-1), bits_of_byte(bytes)).ne(0).view({bytes.size(0), -1});
}

}  // namespace

TwoTensors addmm_activation(const Tensor& bias, const Tensor& a, const Tensor& b, bool use_gelu,
                            bool with_aux) {
  const Tensor sum = at::addmm(bias, a, b);
  if (use_gelu) return {at::gelu(sum, "tanh"), with_aux ? sum : Tensor()};
  // NaN is neither.
  return {at::relu(sum), with_aux ? pack(at::logical_not(at::le(sum, 0))) : Tensor()};
}

TwoTensors mm_activation_backward(const Tensor& a, const Tensor& b, const Tensor& aux,
                                  bool use_gelu, bool bias_gradient) {
  const Tensor outer = at::mm(a, b);
  const Tensor gradient = use_gelu
                              ? at::gelu_backward(outer, aux, "tanh")
                              : at::where(unpack(aux), outer, at::full({}, 0, outer.options()));
  return {gradient, bias_gradient ? gradient.sum(0) : Tensor()};
}

TwoTensors mm_bias_gradient(const Tensor& a, const Tensor& b, bool left) {
  return {at::mm(a, b), left ? a.sum(1) : b.sum(0)};
}

TORCH_LIBRARY_FRAGMENT(acc, m) {
  m.def(
      "addmm_activation(Tensor bias, Tensor a, Tensor b, bool use_gelu, bool with_aux)"
      " -> (Tensor, Tensor)");
  m.def(
      "mm_activation_backward(Tensor a, Tensor b, Tensor aux, bool use_gelu, bool bias_gradient)"
      " -> (Tensor, Tensor)");
  m.def("mm_bias_gradient(Tensor a, Tensor b, bool left) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(acc, CPU, m) {
  m.impl("addmm_activation", &addmm_activation);
  m.impl("mm_activation_backward", &mm_activation_backward);
  m.impl("mm_bias_gradient", &mm_bias_gradient);
}

}  // namespace acc::library
