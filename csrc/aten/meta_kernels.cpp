#include "csrc/aten/meta_kernels.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/_log_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_log_softmax_meta_dispatch.h>
#include <ATen/ops/_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/acos_meta_dispatch.h>
#include <ATen/ops/acosh_meta_dispatch.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addcdiv_meta_dispatch.h>
#include <ATen/ops/addcmul_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/addmv_meta_dispatch.h>
#include <ATen/ops/all_meta_dispatch.h>
#include <ATen/ops/amax_meta_dispatch.h>
#include <ATen/ops/amin_meta_dispatch.h>
#include <ATen/ops/any_meta_dispatch.h>
#include <ATen/ops/argmax_meta_dispatch.h>
#include <ATen/ops/argmin_meta_dispatch.h>
#include <ATen/ops/asin_meta_dispatch.h>
#include <ATen/ops/asinh_meta_dispatch.h>
#include <ATen/ops/atan2_meta_dispatch.h>
#include <ATen/ops/atan_meta_dispatch.h>
#include <ATen/ops/atanh_meta_dispatch.h>
#include <ATen/ops/avg_pool2d_backward_meta_dispatch.h>
#include <ATen/ops/avg_pool2d_meta_dispatch.h>
#include <ATen/ops/baddbmm_meta_dispatch.h>
#include <ATen/ops/bitwise_and_meta_dispatch.h>
#include <ATen/ops/bitwise_not_meta_dispatch.h>
#include <ATen/ops/bitwise_or_meta_dispatch.h>
#include <ATen/ops/bitwise_xor_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/ceil_meta_dispatch.h>
#include <ATen/ops/clamp_max_meta_dispatch.h>
#include <ATen/ops/clamp_meta_dispatch.h>
#include <ATen/ops/clamp_min_meta_dispatch.h>
#include <ATen/ops/cos_meta_dispatch.h>
#include <ATen/ops/cosh_meta_dispatch.h>
#include <ATen/ops/cumprod_meta_dispatch.h>
#include <ATen/ops/cumsum_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/elu_backward_meta_dispatch.h>
#include <ATen/ops/elu_meta_dispatch.h>
#include <ATen/ops/eq_meta_dispatch.h>
#include <ATen/ops/erf_meta_dispatch.h>
#include <ATen/ops/erfc_meta_dispatch.h>
#include <ATen/ops/erfinv_meta_dispatch.h>
#include <ATen/ops/exp2_meta_dispatch.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/expm1_meta_dispatch.h>
#include <ATen/ops/floor_meta_dispatch.h>
#include <ATen/ops/fmax_meta_dispatch.h>
#include <ATen/ops/fmin_meta_dispatch.h>
#include <ATen/ops/fmod_meta_dispatch.h>
#include <ATen/ops/frac_meta_dispatch.h>
#include <ATen/ops/gather_meta_dispatch.h>
#include <ATen/ops/ge_meta_dispatch.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/gelu_meta_dispatch.h>
#include <ATen/ops/glu_meta_dispatch.h>
#include <ATen/ops/gt_meta_dispatch.h>
#include <ATen/ops/hardsigmoid_backward_meta_dispatch.h>
#include <ATen/ops/hardsigmoid_meta_dispatch.h>
#include <ATen/ops/hypot_meta_dispatch.h>
#include <ATen/ops/index_add_meta_dispatch.h>
#include <ATen/ops/index_meta_dispatch.h>
#include <ATen/ops/le_meta_dispatch.h>
#include <ATen/ops/leaky_relu_backward_meta_dispatch.h>
#include <ATen/ops/leaky_relu_meta_dispatch.h>
#include <ATen/ops/lerp_meta_dispatch.h>
#include <ATen/ops/lgamma_meta_dispatch.h>
#include <ATen/ops/linalg_vector_norm_meta_dispatch.h>
#include <ATen/ops/log10_meta_dispatch.h>
#include <ATen/ops/log1p_meta_dispatch.h>
#include <ATen/ops/log2_meta_dispatch.h>
#include <ATen/ops/log_meta_dispatch.h>
#include <ATen/ops/logaddexp_meta_dispatch.h>
#include <ATen/ops/lt_meta_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_backward_meta_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_meta_dispatch.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/minimum_meta_dispatch.h>
#include <ATen/ops/mish_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mse_loss_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/ne_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/nll_loss_backward_meta_dispatch.h>
#include <ATen/ops/nll_loss_forward_meta_dispatch.h>
#include <ATen/ops/pow_meta_dispatch.h>
#include <ATen/ops/reciprocal_meta_dispatch.h>
#include <ATen/ops/remainder_meta_dispatch.h>
#include <ATen/ops/round_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/scatter_add_meta_dispatch.h>
#include <ATen/ops/scatter_meta_dispatch.h>
#include <ATen/ops/sgn_meta_dispatch.h>
#include <ATen/ops/sigmoid_backward_meta_dispatch.h>
#include <ATen/ops/sigmoid_meta_dispatch.h>
#include <ATen/ops/sign_meta_dispatch.h>
#include <ATen/ops/silu_backward_meta_dispatch.h>
#include <ATen/ops/silu_meta_dispatch.h>
#include <ATen/ops/sin_meta_dispatch.h>
#include <ATen/ops/sinh_meta_dispatch.h>
#include <ATen/ops/smooth_l1_loss_meta_dispatch.h>
#include <ATen/ops/softplus_backward_meta_dispatch.h>
#include <ATen/ops/softplus_meta_dispatch.h>
#include <ATen/ops/sort_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/tan_meta_dispatch.h>
#include <ATen/ops/tanh_backward_meta_dispatch.h>
#include <ATen/ops/tanh_meta_dispatch.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>
#include <ATen/ops/topk_meta_dispatch.h>
#include <ATen/ops/tril_meta_dispatch.h>
#include <ATen/ops/triu_meta_dispatch.h>
#include <ATen/ops/trunc_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_backward_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_meta_dispatch.h>
#include <ATen/ops/upsample_nearest2d_backward_meta_dispatch.h>
#include <ATen/ops/upsample_nearest2d_meta_dispatch.h>
#include <ATen/ops/xlogy_meta_dispatch.h>

#include <optional>
#include <tuple>

#include "csrc/aten/meta_install.h"

namespace acc::aten {
namespace meta {
namespace {

using at::Scalar;
using at::Tensor;
using at::native::wrapped_scalar_tensor;
using OptionalScalar = std::optional<Scalar>;
using OptionalType = std::optional<at::ScalarType>;
using OptionalString = std::optional<c10::string_view>;

// Which of the overloads of a name is meant.
using Unary = Tensor (*)(const Tensor&);
using Binary = Tensor (*)(const Tensor&, const Tensor&);
using WithNumber = Tensor (*)(const Tensor&, const Scalar&);
using NumberFirst = Tensor (*)(const Scalar&, const Tensor&);
using WithMode = Tensor (*)(const Tensor&, const Tensor&, OptionalString);

// Operators on a tensor and a number whose kernel takes two tensors.
template <Binary kFunction>
Tensor with_number(const Tensor& self, const Scalar& other) {
  return kFunction(self, wrapped_scalar_tensor(other));
}
Tensor add_number(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return at::meta::add(self, wrapped_scalar_tensor(other), alpha);
}
Tensor sub_number(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return at::meta::sub(self, wrapped_scalar_tensor(other), alpha);
}
Tensor rsub_number(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return at::meta::sub(wrapped_scalar_tensor(other), self, alpha);
}
Tensor div_number_mode(const Tensor& self, const Scalar& other, OptionalString mode) {
  return at::meta::div(self, wrapped_scalar_tensor(other), mode);
}
Tensor floor_divide(const Tensor& self, const Tensor& other) {
  return at::meta::div(self, other, "floor");
}

// Their kernels are another operator's, or lay their result out like it.
Tensor relu(const Tensor& self) { return at::meta::clamp_min(self, 0); }
Tensor like_neg(const Tensor& self) { return at::meta::neg(self); }
Tensor isnan(const Tensor& self) { return at::meta::ne(self, self); }
Tensor hardtanh(const Tensor& self, const Scalar& min, const Scalar& max) {
  return at::meta::clamp(self, min, max);
}
Tensor hardtanh_backward(const Tensor& grad, const Tensor& self, const Scalar&, const Scalar&) {
  return at::meta::mul(grad, self);
}
Tensor safe_softmax(const Tensor& self, int64_t dim, OptionalType) {
  return at::meta::_softmax(self, dim, false);
}
Tensor dropout_backward(const Tensor& grad, const Tensor& mask, double) {
  return at::meta::mul(grad, mask);
}
Tensor sum_of_all(const Tensor& self, OptionalType dtype) {
  return at::meta::sum(self, at::OptionalIntArrayRef(at::IntArrayRef{}), false, dtype);
}
Tensor mean_of_all(const Tensor& self, OptionalType dtype) {
  return at::meta::mean(self, at::OptionalIntArrayRef(at::IntArrayRef{}), false, dtype);
}
std::tuple<Tensor, Tensor> sort(const Tensor& self, int64_t dim, bool descending) {
  return at::meta::sort(self, std::nullopt, dim, descending);
}
Tensor cat(at::TensorList tensors, int64_t dim) { return at::meta::cat(tensors, dim); }

// (self, target, ...) or (grad_output, self, target, ...): classes are numbers of 64 bits, which
// the kernels check and Meta does not.
template <size_t kTarget>
bool classes_are_long(Arguments arguments) {
  return tensor(arguments[kTarget]).scalar_type() == at::kLong &&
         one_floating_type(arguments.slice(0, kTarget));
}

// (grad_output, mask, scale)
bool has_floating_gradient(Arguments arguments) {
  return on_host() && tensor(arguments[0]).is_floating_point();
}
// (self, dim, dtype)
bool keeps_its_type(Arguments arguments) {
  return one_floating_type(arguments) && arguments[2].isNone();
}

}  // namespace
}  // namespace meta

// The first is for names without overloads, the others pick one.
#define ACC_META(name) install("aten::" #name, at::meta::name)
#define ACC_UNARY(name) install("aten::" #name, Unary{at::meta::name})
#define ACC_TENSOR(name) install("aten::" #name ".Tensor", Binary{at::meta::name})
#define ACC_NUMBER(name) install("aten::" #name ".Scalar", WithNumber{at::meta::name})
#define ACC_TENSOR_OR_NUMBER(name) \
  ACC_TENSOR(name);                \
  install("aten::" #name ".Scalar", &with_number<at::meta::name>)

void register_meta_kernels() {
  using namespace meta;
  ACC_META(_log_softmax);
  ACC_META(_log_softmax_backward_data);
  ACC_META(_softmax);
  ACC_META(_softmax_backward_data);
  ACC_META(addcdiv);
  ACC_META(addcmul);
  ACC_META(addmm);
  ACC_META(addmv);
  ACC_META(amax);
  ACC_META(amin);
  ACC_META(argmax);
  ACC_META(argmin);
  ACC_META(atan2);
  ACC_META(avg_pool2d);
  ACC_META(avg_pool2d_backward);
  ACC_META(baddbmm);
  ACC_META(bmm);
  ACC_META(cumprod);
  ACC_META(cumsum);
  ACC_META(elu);
  ACC_META(elu_backward);
  ACC_META(fmax);
  ACC_META(fmin);
  ACC_META(gather);
  ACC_META(gelu);
  ACC_META(gelu_backward);
  ACC_META(glu);
  ACC_META(hardsigmoid_backward);
  ACC_META(hypot);
  ACC_META(index_add);
  ACC_META(leaky_relu);
  ACC_META(leaky_relu_backward);
  ACC_META(linalg_vector_norm);
  ACC_META(logaddexp);
  ACC_META(max_pool2d_with_indices);
  ACC_META(max_pool2d_with_indices_backward);
  ACC_META(maximum);
  ACC_META(minimum);
  ACC_META(mm);
  ACC_META(mse_loss);
  ACC_META(scatter_add);
  ACC_META(sigmoid_backward);
  ACC_META(silu_backward);
  ACC_META(smooth_l1_loss);
  ACC_META(softplus);
  ACC_META(softplus_backward);
  ACC_META(tanh_backward);
  ACC_META(threshold_backward);
  ACC_META(topk);
  ACC_META(tril);
  ACC_META(triu);
  ACC_META(upsample_bilinear2d);
  ACC_META(upsample_bilinear2d_backward);
  ACC_META(upsample_nearest2d);
  ACC_META(upsample_nearest2d_backward);
  ACC_UNARY(acos);
  ACC_UNARY(acosh);
  ACC_UNARY(asin);
  ACC_UNARY(asinh);
  ACC_UNARY(atan);
  ACC_UNARY(atanh);
  ACC_UNARY(bitwise_not);
  ACC_UNARY(ceil);
  ACC_UNARY(cos);
  ACC_UNARY(cosh);
  ACC_UNARY(erf);
  ACC_UNARY(erfc);
  ACC_UNARY(erfinv);
  ACC_UNARY(exp);
  ACC_UNARY(exp2);
  ACC_UNARY(expm1);
  ACC_UNARY(floor);
  ACC_UNARY(frac);
  ACC_UNARY(hardsigmoid);
  ACC_UNARY(lgamma);
  ACC_UNARY(log);
  ACC_UNARY(log10);
  ACC_UNARY(log1p);
  ACC_UNARY(log2);
  ACC_UNARY(mish);
  ACC_UNARY(neg);
  ACC_UNARY(reciprocal);
  ACC_UNARY(rsqrt);
  ACC_UNARY(sgn);
  ACC_UNARY(sigmoid);
  ACC_UNARY(sign);
  ACC_UNARY(silu);
  ACC_UNARY(sin);
  ACC_UNARY(sinh);
  ACC_UNARY(sqrt);
  ACC_UNARY(tan);
  ACC_UNARY(tanh);
  ACC_UNARY(trunc);
  ACC_UNARY(all);
  ACC_UNARY(any);
  ACC_UNARY(round);
  ACC_TENSOR(eq);
  ACC_TENSOR(ge);
  ACC_TENSOR(gt);
  ACC_TENSOR(le);
  ACC_TENSOR(lt);
  ACC_TENSOR(ne);
  ACC_NUMBER(eq);
  ACC_NUMBER(ge);
  ACC_NUMBER(gt);
  ACC_NUMBER(le);
  ACC_NUMBER(lt);
  ACC_NUMBER(ne);
  ACC_TENSOR_OR_NUMBER(bitwise_and);
  ACC_TENSOR_OR_NUMBER(bitwise_or);
  ACC_TENSOR_OR_NUMBER(bitwise_xor);
  ACC_TENSOR_OR_NUMBER(fmod);
  ACC_TENSOR_OR_NUMBER(mul);
  ACC_TENSOR_OR_NUMBER(remainder);
  ACC_TENSOR(div);
  install("aten::div.Scalar", &with_number<Binary{at::meta::div}>);
  ACC_TENSOR(clamp_max);
  ACC_TENSOR(clamp_min);
  ACC_TENSOR(xlogy);
  install("aten::clamp_max", WithNumber{at::meta::clamp_max});
  install("aten::clamp_min", WithNumber{at::meta::clamp_min});
  install("aten::add.Tensor", at::meta::add);
  install("aten::add.Scalar", &add_number);
  install("aten::sub.Tensor", at::meta::sub);
  install("aten::sub.Scalar", &sub_number);
  install("aten::rsub.Scalar", &rsub_number);
  install("aten::div.Tensor_mode", WithMode{at::meta::div});
  install("aten::div.Scalar_mode", &div_number_mode);
  install("aten::floor_divide", &floor_divide);
  install("aten::floor_divide.Scalar", &with_number<floor_divide>);
  install("aten::pow.Tensor_Tensor", Binary{at::meta::pow});
  install("aten::pow.Tensor_Scalar", WithNumber{at::meta::pow});
  install("aten::pow.Scalar", NumberFirst{at::meta::pow});
  using Lerp = Tensor (*)(const Tensor&, const Tensor&, const Scalar&);
  install("aten::lerp.Scalar", Lerp{at::meta::lerp});
  using Clamp = Tensor (*)(const Tensor&, const OptionalScalar&, const OptionalScalar&);
  install("aten::clamp", Clamp{at::meta::clamp});
  install("aten::relu", &relu, &one_floating_type);
  install("aten::abs", &like_neg, &one_floating_type);
  install("aten::isnan", &isnan);
  install("aten::hardswish", &like_neg, &one_floating_type);
  install("aten::hardtanh", &hardtanh, &one_floating_type);
  install("aten::hardtanh_backward", &hardtanh_backward, &one_floating_type);
  install("aten::hardswish_backward", Binary{at::meta::mul}, &one_floating_type);
  install("aten::_safe_softmax", &safe_softmax, &keeps_its_type);
  install("aten::native_dropout_backward", &dropout_backward, &has_floating_gradient);
  install("aten::mean.dim", at::meta::mean);
  install("aten::mean", &mean_of_all);
  install("aten::sum.dim_IntList", at::meta::sum);
  install("aten::sum", &sum_of_all);
  using Reduced = Tensor (*)(const Tensor&, int64_t, bool);
  install("aten::all.dim", Reduced{at::meta::all});
  install("aten::any.dim", Reduced{at::meta::any});
  install("aten::cat", &cat);
  install("aten::sort", &sort);
  install("aten::sort.stable", at::meta::sort);
  install("aten::index.Tensor", at::meta::index);
  using Scattered = Tensor (*)(const Tensor&, int64_t, const Tensor&, const Tensor&);
  install("aten::scatter.src", Scattered{at::meta::scatter});
  using Filled = Tensor (*)(const Tensor&, int64_t, const Tensor&, const Scalar&);
  install("aten::scatter.value", Filled{at::meta::scatter});
  install("aten::nll_loss_forward", at::meta::nll_loss_forward, &classes_are_long<1>);
  install("aten::nll_loss_backward", at::meta::nll_loss_backward, &classes_are_long<2>);
  register_unstructured();
}

#undef ACC_META
#undef ACC_UNARY
#undef ACC_TENSOR
#undef ACC_NUMBER
#undef ACC_TENSOR_OR_NUMBER

}  // namespace acc::aten
