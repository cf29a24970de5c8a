#include "kernels/library/epilogues.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <utility>

namespace acc::library {

using at::Tensor;

TwoTensors addmm_gelu(const Tensor& bias, const Tensor& left, const Tensor& right) {
  Tensor before = at::addmm(bias, left, right);
  Tensor after = at::gelu(before, "tanh");
  return {std::move(after), std::move(before)};
}

Tensor mm_gelu_backward(const Tensor& left, const Tensor& right, const Tensor& before) {
  return at::gelu_backward(at::mm(left, right), before, "tanh");
}

TwoTensors mm_and_sum(const Tensor& left, const Tensor& right, bool keepdim) {
  return {at::mm(left, right), at::sum(left.t(), at::IntArrayRef{0}, keepdim)};
}

namespace {

TORCH_LIBRARY_FRAGMENT(acc, m) {
  m.def("addmm_gelu(Tensor bias, Tensor left, Tensor right) -> (Tensor, Tensor)");
  m.def("mm_gelu_backward(Tensor left, Tensor right, Tensor before) -> Tensor");
  m.def("mm_and_sum(Tensor left, Tensor right, bool keepdim) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(acc, CPU, m) {
  m.impl("addmm_gelu", &addmm_gelu);
  m.impl("mm_gelu_backward", &mm_gelu_backward);
  m.impl("mm_and_sum", &mm_and_sum);
}

}  // namespace
}  // namespace acc::library
