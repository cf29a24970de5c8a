#include "csrc/aten/meta_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/native/layer_norm.h>
#include <ATen/ops/_log_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_log_softmax_meta_dispatch.h>
#include <ATen/ops/_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addcdiv_meta_dispatch.h>
#include <ATen/ops/addcmul_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/baddbmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/clamp_meta_dispatch.h>
#include <ATen/ops/clamp_min_meta_dispatch.h>
#include <ATen/ops/cos_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/erf_meta_dispatch.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/ge_meta_dispatch.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/gelu_meta_dispatch.h>
#include <ATen/ops/lerp_meta_dispatch.h>
#include <ATen/ops/log1p_meta_dispatch.h>
#include <ATen/ops/log_meta_dispatch.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/minimum_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/nll_loss_backward_meta_dispatch.h>
#include <ATen/ops/nll_loss_forward_meta_dispatch.h>
#include <ATen/ops/pow_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/sgn_meta_dispatch.h>
#include <ATen/ops/sigmoid_backward_meta_dispatch.h>
#include <ATen/ops/sigmoid_meta_dispatch.h>
#include <ATen/ops/silu_backward_meta_dispatch.h>
#include <ATen/ops/silu_meta_dispatch.h>
#include <ATen/ops/sin_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/tanh_backward_meta_dispatch.h>
#include <ATen/ops/tanh_meta_dispatch.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "lazy/record/infer.h"

namespace acc::aten {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- operators whose kernels are not structured -------------------------------------------------

Tensor number(const at::Scalar& value) {
  Tensor tensor = c10::scalar_to_tensor(value);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Tensor mul_number(const Tensor& self, const at::Scalar& other) {
  return at::meta::mul(self, number(other));
}
Tensor div_number(const Tensor& self, const at::Scalar& other) {
  return at::meta::div(self, number(other));
}
Tensor add_number(const Tensor& self, const at::Scalar& other, const at::Scalar& alpha) {
  return at::meta::add(self, number(other), alpha);
}
Tensor sub_number(const Tensor& self, const at::Scalar& other, const at::Scalar& alpha) {
  return at::meta::sub(self, number(other), alpha);
}

Tensor div(const Tensor& self, const Tensor& other) { return at::meta::div(self, other); }
Tensor& div_(Tensor& self, const Tensor& other) { return at::meta::div_(self, other); }
Tensor lerp(const Tensor& self, const Tensor& end, const at::Scalar& weight) {
  return at::meta::lerp(self, end, weight);
}
Tensor& lerp_(Tensor& self, const Tensor& end, const at::Scalar& weight) {
  return at::meta::lerp_(self, end, weight);
}
Tensor& fill(Tensor& self, const at::Scalar&) { return self; }
Tensor pow_number(const Tensor& self, const at::Scalar& exponent) {
  return at::meta::pow(self, exponent);
}
Tensor number_pow(const at::Scalar& base, const Tensor& exponent) {
  return at::meta::pow(base, exponent);
}
// One geometry for all comparisons with a number.
Tensor compare_number(const Tensor& self, const at::Scalar& other) {
  return at::meta::ge(self, other);
}
Tensor compare(const Tensor& self, const Tensor& other) { return at::meta::ge(self, other); }
Tensor clamp(const Tensor& self, const std::optional<at::Scalar>& min,
             const std::optional<at::Scalar>& max) {
  return at::meta::clamp(self, min, max);
}
// Their kernels are another operator's, or lay their result out like it.
Tensor relu(const Tensor& self) { return at::meta::clamp_min(self, 0); }
Tensor abs(const Tensor& self) { return at::meta::neg(self); }

Tensor mean_of_all(const Tensor& self, std::optional<at::ScalarType> dtype) {
  return at::meta::mean(self, at::OptionalIntArrayRef(at::IntArrayRef{}), false, dtype);
}

Tensor like(const Tensor& tensor) {
  return at::detail::empty_meta(tensor.sizes(), tensor.scalar_type());
}

// input [*stat, *normalized] -> normalised like it, mean and rstd [*stat, 1, ...]
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, c10::SymIntArrayRef normalized,
                                              const OptionalTensor& weight,
                                              const OptionalTensor& bias, double) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(normalized);
  at::native::_check_layer_norm_inputs(input, shape, weight.value_or(Tensor()),
                                       bias.value_or(Tensor()));
  std::vector<int64_t> stat = input.sizes().vec();
  std::fill(stat.end() - static_cast<int64_t>(shape.size()), stat.end(), 1);
  const auto make = [&] { return at::detail::empty_meta(stat, input.scalar_type()); };
  return {like(input), make(), make()};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor&, const Tensor& input,
                                                       c10::SymIntArrayRef, const Tensor&,
                                                       const Tensor&, const OptionalTensor& weight,
                                                       const OptionalTensor& bias,
                                                       std::array<bool, 3> wanted) {
  const auto make = [](bool want, const Tensor& tensor) { return want ? like(tensor) : Tensor(); };
  return {make(wanted[0], input), make(wanted[1], weight.value_or(Tensor())),
          make(wanted[2], bias.value_or(Tensor()))};
}

// The updates of all parameters in one call: nothing is new. PyTorch has Meta kernels for those of
// Adam only.
void fused_sgd_(at::TensorList, at::TensorList, at::TensorList, double, double, double, double,
                bool, bool, bool, const OptionalTensor&, const OptionalTensor&) {}
void fused_adagrad_(at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double,
                    double, double, bool, const OptionalTensor&, const OptionalTensor&) {}

// ---- which cases they are good for -------------------------------------------------------------

using Arguments = c10::ArrayRef<c10::IValue>;

bool any(Arguments) { return true; }

// All tensors have one real floating type, which the kernels work in without exception.
bool one_floating_type(Arguments arguments) {
  std::optional<at::ScalarType> type;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::ScalarType other = argument.toTensor().scalar_type();
    if (!at::isFloatingType(other) || type.value_or(other) != other) return false;
    type = other;
  }
  return true;
}

// (self, target, ...) or (grad_output, self, target, ...): classes are numbers of 64 bits, which
// the kernels check and Meta does not.
template <size_t kTarget>
bool classes_are_long(Arguments arguments) {
  return arguments[kTarget].toTensor().scalar_type() == at::kLong &&
         one_floating_type(arguments.slice(0, kTarget));
}

// Lists of as many tensors each as the first. Momenta, say, may be an empty list.
bool equally_many(Arguments arguments) {
  const size_t count = arguments[0].toListRef().size();
  return std::ranges::all_of(arguments, [count](const c10::IValue& argument) {
    return !argument.isList() || argument.toListRef().empty() ||
           argument.toListRef().size() == count;
  });
}

template <class Function>
void install(const char* name, Function function, bool (*applies)(Arguments arguments) = &any) {
  record::install_meta_kernel(name,
                              {c10::KernelFunction::makeFromUnboxedFunction(function), applies});
}

}  // namespace

// A name stands for one overload here; these pick it.
#define ACC_META(name, function) install("aten::" name, TORCH_FN(at::meta::function))

void register_meta_kernels() {
  ACC_META("add.Tensor", add);
  ACC_META("add_.Tensor", add_);
  ACC_META("sub.Tensor", sub);
  ACC_META("sub_.Tensor", sub_);
  ACC_META("mul.Tensor", mul);
  ACC_META("mul_.Tensor", mul_);
  ACC_META("addcmul", addcmul);
  ACC_META("addcmul_", addcmul_);
  ACC_META("addcdiv", addcdiv);
  ACC_META("addcdiv_", addcdiv_);
  ACC_META("mm", mm);
  ACC_META("bmm", bmm);
  ACC_META("addmm", addmm);
  ACC_META("baddbmm", baddbmm);
  ACC_META("gelu", gelu);
  ACC_META("gelu_backward", gelu_backward);
  ACC_META("silu", silu);
  ACC_META("silu_backward", silu_backward);
  ACC_META("sigmoid", sigmoid);
  ACC_META("sigmoid_backward", sigmoid_backward);
  ACC_META("tanh", tanh);
  ACC_META("tanh_backward", tanh_backward);
  ACC_META("threshold_backward", threshold_backward);
  ACC_META("erf", erf);
  ACC_META("exp", exp);
  ACC_META("log", log);
  ACC_META("log1p", log1p);
  ACC_META("sin", sin);
  ACC_META("cos", cos);
  ACC_META("sqrt", sqrt);
  ACC_META("rsqrt", rsqrt);
  ACC_META("neg", neg);
  ACC_META("sgn", sgn);
  ACC_META("maximum", maximum);
  ACC_META("minimum", minimum);
  ACC_META("_softmax", _softmax);
  ACC_META("_softmax_backward_data", _softmax_backward_data);
  ACC_META("_log_softmax", _log_softmax);
  ACC_META("_log_softmax_backward_data", _log_softmax_backward_data);
  ACC_META("mean.dim", mean);
  ACC_META("sum.dim_IntList", sum);
  install("aten::mul.Scalar", TORCH_FN(mul_number));
  install("aten::div.Scalar", TORCH_FN(div_number));
  install("aten::add.Scalar", TORCH_FN(add_number));
  install("aten::sub.Scalar", TORCH_FN(sub_number));
  install("aten::div.Tensor", TORCH_FN(div));
  install("aten::div_.Tensor", TORCH_FN(div_));
  install("aten::lerp.Scalar", TORCH_FN(lerp));
  install("aten::lerp_.Scalar", TORCH_FN(lerp_));
  install("aten::fill_.Scalar", TORCH_FN(fill));
  install("aten::pow.Tensor_Scalar", TORCH_FN(pow_number));
  install("aten::pow.Scalar", TORCH_FN(number_pow));
  install("aten::clamp", TORCH_FN(clamp));
  install("aten::relu", TORCH_FN(relu), &one_floating_type);
  install("aten::abs", TORCH_FN(abs), &one_floating_type);
  for (const char* name : {"aten::ge.Scalar", "aten::gt.Scalar", "aten::le.Scalar",
                           "aten::lt.Scalar", "aten::eq.Scalar", "aten::ne.Scalar"}) {
    install(name, TORCH_FN(compare_number), &one_floating_type);
  }
  for (const char* name : {"aten::ge.Tensor", "aten::gt.Tensor", "aten::le.Tensor",
                           "aten::lt.Tensor", "aten::eq.Tensor", "aten::ne.Tensor"}) {
    install(name, TORCH_FN(compare), &one_floating_type);
  }
  install("aten::nll_loss_forward", TORCH_FN(at::meta::nll_loss_forward), &classes_are_long<1>);
  install("aten::nll_loss_backward", TORCH_FN(at::meta::nll_loss_backward), &classes_are_long<2>);
  install("aten::mean", TORCH_FN(mean_of_all));
  install("aten::_fused_sgd_", TORCH_FN(fused_sgd_), &equally_many);
  install("aten::_fused_adagrad_", TORCH_FN(fused_adagrad_), &equally_many);
  install("aten::native_layer_norm", TORCH_FN(layer_norm), &one_floating_type);
  install("aten::native_layer_norm_backward", TORCH_FN(layer_norm_backward), &one_floating_type);
}

#undef ACC_META

}  // namespace acc::aten
