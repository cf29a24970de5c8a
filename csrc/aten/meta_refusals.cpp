#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "csrc/aten/meta_arguments.h"
#include "csrc/aten/meta_rules.h"
#include "lazy/record/infer.h"

// Calls that a Meta kernel accepts and eager refuses, or answers otherwise: these run at once, so
// that eager raises in the call or has its own answer.
namespace acc::aten {
namespace {

// Without training the CPU kernel empties the tensors for statistics that it is given.
bool batch_norm_out(Arguments arguments, torch::jit::Stack&) {
  return !on_host() || arguments[5].toBool();
}

// (self, approximate)
bool gelu(Arguments arguments, torch::jit::Stack&) {
  const std::string_view kind = arguments[1].toStringView();
  return kind == "none" || kind == "tanh";
}

// (real, imag, out)
bool complex_out(Arguments arguments, torch::jit::Stack&) {
  const c10::ScalarType part = arguments[0].toTensor().scalar_type();
  return arguments[1].toTensor().scalar_type() == part &&
         arguments[2].toTensor().scalar_type() == c10::toComplexType(part);
}

// (self, mask, source)
bool masked_scatter(Arguments arguments, torch::jit::Stack&) {
  return arguments[1].toTensor().scalar_type() == c10::kBool &&
         arguments[0].toTensor().scalar_type() == arguments[2].toTensor().scalar_type();
}
bool masked_scatter_(Arguments arguments, torch::jit::Stack& results) {
  return masked_scatter(arguments, results) &&
         at::is_expandable_to(arguments[1].toTensor().sizes(), arguments[0].toTensor().sizes());
}

// (self, dim, keepdim, min, max)
bool aminmax_out(Arguments arguments, torch::jit::Stack&) {
  const c10::ScalarType type = arguments[0].toTensor().scalar_type();
  return arguments[3].toTensor().scalar_type() == type &&
         arguments[4].toTensor().scalar_type() == type;
}

// (self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
bool avg_pool3d(Arguments arguments, torch::jit::Stack&) {
  if (on_host() && c10::isReducedFloatingType(tensor(arguments[0]).scalar_type())) return false;
  return arguments[6].isNone() || arguments[6].toInt() != 0;
}

// (self, dim, index, source, alpha)
bool index_add(Arguments arguments, torch::jit::Stack&) {
  const at::Tensor& self = arguments[0].toTensor();
  const at::Tensor& source = arguments[3].toTensor();
  if (self.scalar_type() != source.scalar_type()) return false;
  if (self.dim() != source.dim()) return self.dim() == 0 || source.dim() == 0;
  const int64_t dim = wrapped(arguments[1], self);
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (d != dim && self.size(d) != source.size(d)) return false;
  }
  return true;
}

// (self, boundaries, out_int32, right)
bool bucketize(Arguments arguments, torch::jit::Stack&) {
  return arguments[1].toTensor().dim() == 1;
}

// (self, ...). With channels last the CPU kernel wants a batch, and positions that an integer as
// wide as the elements can count (32 bits for the halves).
bool pools_in_format(Arguments arguments, int64_t spatial) {
  const at::Tensor& self = tensor(arguments[0]);
  if (self.suggest_memory_format() == c10::MemoryFormat::Contiguous) return true;
  if (self.dim() != spatial + 2) return false;
  if (!on_host() || self.element_size() > 2 || self.is_floating_point()) return true;
  const int64_t positions = c10::multiply_integers(self.sizes().slice(2));
  return positions <= (self.element_size() == 1 ? INT8_MAX : INT16_MAX);
}
bool max_pool2d(Arguments arguments, torch::jit::Stack&) { return pools_in_format(arguments, 2); }
bool max_pool3d(Arguments arguments, torch::jit::Stack&) { return pools_in_format(arguments, 3); }

// (grad_output, self, target, ...), whose result is like self
bool nll_loss2d_backward(Arguments arguments, torch::jit::Stack&) {
  return one_type(arguments) &&
         tensor(arguments[1]).suggest_memory_format() == c10::MemoryFormat::Contiguous;
}

bool is_dim(const c10::IValue& dim, const at::Tensor& self) {
  const int64_t dims = std::max<int64_t>(self.dim(), 1);
  return dim.isNone() || (dim.toInt() >= -dims && dim.toInt() < dims);
}

bool is_index(const at::Tensor& index) {
  return index.dim() <= 1 &&
         (index.scalar_type() == c10::kLong || index.scalar_type() == c10::kInt);
}

bool same_types(Arguments arguments, torch::jit::Stack&) {
  return tensor(arguments[0]).scalar_type() == tensor(arguments[1]).scalar_type();
}

// (self, target, weight, pos_weight, reduction), computed in place in what the target makes.
bool bce_with_logits(Arguments arguments, torch::jit::Stack&) {
  return one_type(arguments) && tensor(arguments[1]).is_floating_point();
}

bool of_one_type(Arguments arguments, torch::jit::Stack&) { return one_type(arguments); }

// (self, dim, ...) and (self, *, stable, dim, descending)
template <size_t Dim>
bool has_dim(Arguments arguments, torch::jit::Stack&) {
  return is_dim(arguments[Dim], tensor(arguments[0]));
}

// (self, dim, ...), taking one element of each row
bool picks_in_rows(Arguments arguments, torch::jit::Stack&) {
  const at::Tensor& self = tensor(arguments[0]);
  if (!is_dim(arguments[1], self)) return false;
  const int64_t dim = wrapped(arguments[1], self);
  return self.dim() == 0 || self.size(dim) > 0;
}

// (self)
bool has_elements(Arguments arguments, torch::jit::Stack&) {
  return tensor(arguments[0]).numel() > 0;
}

// (self, dim, index, ...)
bool has_index(Arguments arguments, torch::jit::Stack&) {
  return is_dim(arguments[1], tensor(arguments[0])) && is_index(tensor(arguments[2]));
}

// (self, dim, index, source)
bool index_copy(Arguments arguments, torch::jit::Stack& results) {
  const at::Tensor& self = tensor(arguments[0]);
  const at::Tensor& index = tensor(arguments[2]);
  const at::Tensor& source = tensor(arguments[3]);
  if (!has_index(arguments, results) || index.scalar_type() != c10::kLong ||
      self.scalar_type() != source.scalar_type() || self.dim() != source.dim()) {
    return false;
  }
  const int64_t dim = wrapped(arguments[1], self);
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (source.size(d) != (d == dim ? index.numel() : self.size(d))) return false;
  }
  return true;
}

// (self, index, source, accumulate)
bool put(Arguments arguments, torch::jit::Stack&) {
  return tensor(arguments[1]).scalar_type() == c10::kLong &&
         tensor(arguments[1]).numel() == tensor(arguments[2]).numel() &&
         tensor(arguments[0]).scalar_type() == tensor(arguments[2]).scalar_type();
}

// (self, mask, value)
bool masked_fill(Arguments arguments, torch::jit::Stack&) {
  return tensor(arguments[1]).scalar_type() == c10::kBool;
}

bool is_bool(const c10::IValue& value) {
  return value.isTensor() ? tensor(value).scalar_type() == c10::kBool : value.isBool();
}

// (self, other, alpha)
bool add_or_subtract(Arguments arguments, torch::jit::Stack&) {
  const auto integral = [](const c10::IValue& value) {
    return value.isTensor() ? c10::isIntegralType(tensor(value).scalar_type(), true)
                            : !value.isDouble() && !value.isComplexDouble();
  };
  const c10::IValue& alpha = arguments[2];
  if (alpha.isBool()) return is_bool(arguments[0]) && is_bool(arguments[1]);
  return !(integral(arguments[0]) && integral(arguments[1])) || integral(alpha);
}
bool subtract(Arguments arguments, torch::jit::Stack& results) {
  return !is_bool(arguments[0]) && !is_bool(arguments[1]) && add_or_subtract(arguments, results);
}

// (self, exponent)
bool power(Arguments arguments, torch::jit::Stack&) {
  if (!c10::isIntegralType(tensor(arguments[0]).scalar_type(), /*includeBool=*/true)) return true;
  return arguments[1].isInt() && arguments[1].toInt() >= 0;
}

bool never(Arguments, torch::jit::Stack&) { return false; }

}  // namespace

void register_meta_refusals() {
  using record::install_meta_rule;
  for (const char* name : {"aten::sort", "aten::cummax", "aten::cummin"}) {
    install_meta_rule(name, &has_dim<1>);
  }
  install_meta_rule("aten::sort.stable", &has_dim<2>);
  install_meta_rule("aten::kthvalue", &has_dim<2>);
  for (const char* name : {"aten::max.dim", "aten::min.dim", "aten::mode", "aten::median.dim",
                           "aten::nanmedian.dim"}) {
    install_meta_rule(name, &picks_in_rows);
  }
  for (const char* name : {"aten::max", "aten::min", "aten::aminmax"}) {
    install_meta_rule(name, &has_elements);
  }
  for (const char* name :
       {"aten::index_select", "aten::index_fill_.int_Scalar", "aten::index_fill_.int_Tensor",
        "aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor"}) {
    install_meta_rule(name, &has_index);
  }
  for (const char* name : {"aten::index_copy", "aten::index_copy_"}) {
    install_meta_rule(name, &index_copy);
  }
  // Its result may be lazily conjugated, and then so has to be the tensor that is given for it.
  install_meta_rule("aten::linalg_lu_solve.out", &never);
  // Their Meta kernels do not resize what they are given for results.
  for (const char* name :
       {"aten::frexp.Tensor_out", "aten::split_with_sizes_copy.out", "aten::unbind_copy.int_out"}) {
    install_meta_rule(name, &never);
  }
  for (const char* name : {"aten::put", "aten::put_"}) install_meta_rule(name, &put);
  for (const char* name : {"aten::masked_fill.Scalar", "aten::masked_fill.Tensor",
                           "aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor"}) {
    install_meta_rule(name, &masked_fill);
  }
  for (const char* name : {"aten::heaviside_", "aten::linalg_cross"}) {
    install_meta_rule(name, &same_types);
  }
  for (const char* name : {"aten::_euclidean_dist",
                           "aten::_softmax_backward_data",
                           "aten::_log_softmax_backward_data",
                           "aten::addr",
                           "aten::nll_loss_forward",
                           "aten::nll_loss_backward",
                           "aten::nll_loss2d_forward",
                           "aten::soft_margin_loss",
                           "aten::soft_margin_loss_backward",
                           "aten::multi_margin_loss",
                           "aten::multi_margin_loss_backward",
                           "aten::huber_loss",
                           "aten::index_reduce",
                           "aten::index_reduce_",
                           "aten::index_put",
                           "aten::index_put_",
                           "aten::_index_put_impl_",
                           "aten::_unsafe_index_put",
                           "aten::_unsafe_masked_index_put_accumulate",
                           "aten::grid_sampler_2d",
                           "aten::grid_sampler_2d_backward",
                           "aten::grid_sampler_3d",
                           "aten::grid_sampler_3d_backward"}) {
    install_meta_rule(name, &of_one_type);
  }
  install_meta_rule("aten::binary_cross_entropy_with_logits", &bce_with_logits);
  for (const char* name : {"aten::add.Tensor", "aten::add_.Tensor"}) {
    install_meta_rule(name, &add_or_subtract);
  }
  for (const char* name : {"aten::sub.Tensor", "aten::sub_.Tensor", "aten::rsub.Tensor"}) {
    install_meta_rule(name, &subtract);
  }
  for (const char* name : {"aten::pow.Tensor_Scalar", "aten::pow_.Scalar"}) {
    install_meta_rule(name, &power);
  }
  install_meta_rule("aten::native_batch_norm.out", &batch_norm_out);
  install_meta_rule("aten::gelu", &gelu);
  install_meta_rule("aten::complex.out", &complex_out);
  install_meta_rule("aten::masked_scatter", &masked_scatter);
  install_meta_rule("aten::masked_scatter_", &masked_scatter_);
  install_meta_rule("aten::aminmax.out", &aminmax_out);
  install_meta_rule("aten::avg_pool3d", &avg_pool3d);
  install_meta_rule("aten::index_add", &index_add);
  install_meta_rule("aten::index_add.out", &index_add);
  install_meta_rule("aten::index_add_", &index_add);
  install_meta_rule("aten::bucketize.Tensor", &bucketize);
  install_meta_rule("aten::max_pool2d_with_indices", &max_pool2d);
  install_meta_rule("aten::max_pool3d_with_indices", &max_pool3d);
  install_meta_rule("aten::nll_loss2d_backward", &nll_loss2d_backward);
}

}  // namespace acc::aten
