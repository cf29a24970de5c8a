#include "kernels/library/epilogues.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <utility>

namespace acc::library {

using at::Tensor;

void check_product(const char* name, const Tensor& left, const Tensor& right) {
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0), "[", name,
              "] multiplies matrices of shapes (R, k) and (k, n), not ", left.sizes(), " and ",
              right.sizes(), ".");
  TORCH_CHECK(left.scalar_type() == right.scalar_type() && left.device() == right.device(), "[",
              name, "] multiplies matrices of one dtype and device, not ", left.scalar_type(),
              " on ", left.device(), " and ", right.scalar_type(), " on ", right.device(), ".");
}

void check_bias(const Tensor& bias, const Tensor& right) {
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == right.size(1) && bias.is_contiguous() &&
                  bias.scalar_type() == right.scalar_type() && bias.device() == right.device(),
              "[acc::addmm_gelu] the bias is a contiguous vector of ", right.size(1), " ",
              right.scalar_type(), " on ", right.device(), ", not ", bias.sizes(), " with strides ",
              bias.strides(), " of ", bias.scalar_type(), " on ", bias.device(), ".");
}

void check_before(const Tensor& before, const Tensor& left, const Tensor& right) {
  TORCH_CHECK(before.dim() == 2 && before.size(0) == left.size(0) &&
                  before.size(1) == right.size(1) && before.is_contiguous() &&
                  before.scalar_type() == left.scalar_type() && before.device() == left.device(),
              "[acc::mm_gelu_backward] what the GELU was taken of is a contiguous matrix (",
              left.size(0), ", ", right.size(1), ") of ", left.scalar_type(), " on ", left.device(),
              ", not ", before.sizes(), " with strides ", before.strides(), " of ",
              before.scalar_type(), " on ", before.device(), ".");
}

TwoTensors addmm_gelu(const Tensor& bias, const Tensor& left, const Tensor& right) {
  check_product("acc::addmm_gelu", left, right);
  check_bias(bias, right);
  Tensor before = at::addmm(bias, left, right);
  Tensor after = at::gelu(before, "tanh");
  return {std::move(after), std::move(before)};
}

Tensor mm_gelu_backward(const Tensor& left, const Tensor& right, const Tensor& before) {
  check_product("acc::mm_gelu_backward", left, right);
  check_before(before, left, right);
  return at::gelu_backward(at::mm(left, right), before, "tanh");
}

TwoTensors mm_and_sum(const Tensor& left, const Tensor& right, bool keepdim) {
  check_product("acc::mm_and_sum", left, right);
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
