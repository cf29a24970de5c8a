#include "csrc/aten/meta_rules.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/native/ConvUtils.h>

#include <algorithm>
#include <numeric>

#include "csrc/aten/geometry.h"
#include "csrc/runtime/backend.h"
#include "lazy/record/infer.h"

namespace acc::aten {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

bool on_host() { return runtime::backend().alias_type() == c10::kCPU; }

const at::Tensor& tensor(const c10::IValue& value) { return value.toTensor(); }

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// Gives a Meta tensor the strides of a memory format.
void restride(c10::IValue& result, c10::MemoryFormat format) {
  if (!result.isTensor() || !result.toTensor().defined()) return;
  const at::Tensor& tensor = result.toTensor();
  const bool fits = (format == c10::MemoryFormat::ChannelsLast && tensor.dim() == 4) ||
                    (format == c10::MemoryFormat::ChannelsLast3d && tensor.dim() == 5);
  result = at::detail::empty_meta(tensor.sizes(), tensor.scalar_type(),
                                  fits ? format : c10::MemoryFormat::Contiguous);
}

void restride(c10::IValue& result, c10::IntArrayRef strides) {
  const at::Tensor& tensor = result.toTensor();
  result = at::detail::empty_strided_meta(tensor.sizes(), strides, tensor.scalar_type());
}

c10::SymIntArrayRef ints(const std::vector<c10::SymInt>& values) { return values; }

// A dimension that may be counted from the end.
int64_t wrapped(const c10::IValue& dim, const at::Tensor& self) {
  return dim.toInt() + (dim.toInt() < 0 ? self.dim() : 0);
}

// The layout that ATen's choice of convolution kernel works in.
c10::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight,
                                     const at::Tensor& bias, const Arguments& rest,
                                     at::OptionalSymIntArrayRef bias_sizes) {
  // One-dimensional convolutions copy their input into plain order first, inside the very function
  // that is asked here.
  if (input.dim() == 3) return c10::MemoryFormat::Contiguous;
  const at::Tensor x = geometry_only(input);
  const at::Tensor w = geometry_only(weight);
  const at::Tensor b = geometry_only(bias);
  const auto stride = rest[0].toSymIntVector();
  const auto padding = rest[1].toSymIntVector();
  const auto dilation = rest[2].toSymIntVector();
  const auto output_padding = rest[4].toSymIntVector();
  const auto backend = at::native::select_conv_backend(
      x, w, b.defined() ? std::optional<at::Tensor>(b) : std::nullopt, ints(stride), ints(padding),
      ints(dilation), rest[3].toBool(), ints(output_padding), rest[5].toSymInt(), bias_sizes);
  return at::native::_determine_backend_memory_format(x, w, backend);
}

bool all_positive(const c10::IValue& value) {
  return std::ranges::all_of(value.toSymIntVector(), [](const c10::SymInt& n) { return n > 0; });
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
bool convolution(Arguments arguments, torch::jit::Stack& results) {
  if (!all_positive(arguments[5])) return false;
  restride(results[0],
           convolution_format(arguments[0].toTensor(), arguments[1].toTensor(),
                              tensor_or_none(arguments[2]), arguments.slice(3), std::nullopt));
  return true;
}

// (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
//  groups, output_mask)
bool convolution_backward(Arguments arguments, torch::jit::Stack& results) {
  const std::vector<c10::SymInt> bias_sizes =
      arguments[3].isNone() ? std::vector<c10::SymInt>() : arguments[3].toSymIntVector();
  const auto format = convolution_format(
      arguments[1].toTensor(), arguments[2].toTensor(), at::Tensor(), arguments.slice(4),
      arguments[3].isNone() ? at::OptionalSymIntArrayRef()
                            : at::OptionalSymIntArrayRef(c10::SymIntArrayRef(bias_sizes)));
  restride(results[0], format);
  restride(results[1], format);
  return true;
}

// (self, indices, output_size)
bool max_unpool2d(Arguments arguments, torch::jit::Stack& results) {
  if (on_host()) restride(results[0], arguments[0].toTensor().suggest_memory_format());
  return true;
}

// The strides that MKL's transforms give a result of `sizes`: its plans want the transformed
// dimensions last. ATen moves them there, both groups ordered by their strides in the input,
// computes into plain order and moves them back. A last dimension that is halved or doubled stays
// last.
std::vector<int64_t> fft_strides(c10::IntArrayRef sizes, c10::IntArrayRef input_strides,
                                 c10::IntArrayRef dims, bool last_stays) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto batch_end = std::partition(order.begin(), order.end(), [&](int64_t d) {
    return std::ranges::find(dims, d) == dims.end();
  });
  std::ranges::copy(dims, batch_end);
  const auto by_stride = [&](int64_t a, int64_t b) {
    return input_strides[static_cast<size_t>(a)] > input_strides[static_cast<size_t>(b)];
  };
  std::sort(order.begin(), batch_end, by_stride);
  std::sort(batch_end, order.end() - (last_stays ? 1 : 0), by_stride);
  std::vector<int64_t> strides(order.size());
  int64_t elements = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[static_cast<size_t>(*d)] = elements;
    elements *= std::max<int64_t>(sizes[static_cast<size_t>(*d)], 1);
  }
  return strides;
}

// Without MKL, Meta promises the right layout.
bool mkl_transforms() { return on_host() && at::globalContext().hasMKL(); }

// (self, dim, normalization, onesided)
bool fft_r2c(Arguments arguments, torch::jit::Stack& results) {
  if (!mkl_transforms()) return true;
  restride(results[0], fft_strides(results[0].toTensor().sizes(), arguments[0].toTensor().strides(),
                                   arguments[1].toIntVector(), /*last_stays=*/true));
  return true;
}

// (self, dim, normalization, forward)
bool fft_c2c(Arguments arguments, torch::jit::Stack& results) {
  const auto dims = arguments[1].toIntVector();
  if (!mkl_transforms() || dims.empty()) return true;
  const at::Tensor& self = arguments[0].toTensor();
  restride(results[0], fft_strides(self.sizes(), self.strides(), dims, /*last_stays=*/false));
  return true;
}

// (self, dim, normalization, last_dim_size). Complex transforms of all but the last come first.
bool fft_c2r(Arguments arguments, torch::jit::Stack& results) {
  if (!mkl_transforms()) return true;
  const auto dims = arguments[1].toIntVector();
  const at::Tensor& self = arguments[0].toTensor();
  std::vector<int64_t> strides = self.strides().vec();
  if (dims.size() > 1) {
    strides = fft_strides(self.sizes(), strides, c10::IntArrayRef(dims).slice(0, dims.size() - 1),
                          /*last_stays=*/false);
  }
  restride(results[0], fft_strides(results[0].toTensor().sizes(), strides, {dims.back()},
                                   /*last_stays=*/true));
  return true;
}

// (input, weight, bias, N, C, HxW, group, eps)
bool group_norm(Arguments arguments, torch::jit::Stack& results) {
  if (on_host()) restride(results[0], arguments[0].toTensor().suggest_memory_format());
  return true;
}

// (self). A result and what its backward needs.
bool log_sigmoid(Arguments, torch::jit::Stack& results) {
  if (!on_host()) return true;
  restride(results[0], c10::MemoryFormat::Contiguous);
  restride(results[1], c10::MemoryFormat::Contiguous);
  return true;
}

// (self, shifts, dims). One dimension is rolled by joining two slices.
bool roll(Arguments arguments, torch::jit::Stack& results) {
  const at::Tensor& self = arguments[0].toTensor();
  const auto shifts = arguments[1].toIntVector();
  const auto dims = arguments[2].toIntVector();
  if (!on_host() || dims.size() != 1 || shifts.size() != 1 || self.numel() == 0) return true;
  const int64_t length = self.size(dims[0]);
  restride(results[0],
           shifts[0] % length == 0 ? c10::MemoryFormat::Contiguous : self.suggest_memory_format());
  return true;
}

// Pointwise operators whose Meta kernel is Python's and lays its result out otherwise.
bool pointwise(Arguments arguments, torch::jit::Stack& results) {
  restride(results[0], record::pointwise_strides(arguments));
  return true;
}

// The type that the CPU kernel keeps statistics in: that of the input, or float32 when a half has
// float32 parameters. Nothing for types that it refuses.
std::optional<c10::ScalarType> statistics_type(const at::Tensor& input, Arguments parameters) {
  const auto all_are = [&](c10::ScalarType type) {
    return std::ranges::all_of(parameters, [&](const c10::IValue& value) {
      const at::Tensor parameter = tensor_or_none(value);
      return !parameter.defined() || parameter.scalar_type() == type;
    });
  };
  const c10::ScalarType type = input.scalar_type();
  if (all_are(type)) return type;
  if (c10::isReducedFloatingType(type) && all_are(c10::kFloat)) return c10::kFloat;
  return std::nullopt;
}

// (input, and as many `parameters`: weight, bias and, where there are any, running statistics).
// What is saved for backward has no elements without training.
bool saved_statistics(Arguments arguments, size_t parameters, bool training,
                      torch::jit::Stack& results) {
  if (!on_host()) return true;
  const at::Tensor& input = arguments[0].toTensor();
  const auto type = statistics_type(input, arguments.slice(1, parameters));
  if (!type) return false;
  restride(results[0], input.suggest_memory_format());
  for (size_t i = 1; i <= 2; ++i) {
    results[i] = at::detail::empty_meta({training ? input.size(1) : 0}, *type);
  }
  return true;
}

// (input, weight, bias, running_mean, running_var, training, momentum, eps)
bool batch_norm(Arguments arguments, torch::jit::Stack& results) {
  return saved_statistics(arguments, 4, arguments[5].toBool(), results);
}

// (input, weight, bias, training, momentum, eps)
bool batch_norm_no_stats(Arguments arguments, torch::jit::Stack& results) {
  return saved_statistics(arguments, 2, arguments[3].toBool(), results);
}

// (input, weight, bias, running_mean, running_var, momentum, eps)
template <bool Training>
bool batch_norm_fixed(Arguments arguments, torch::jit::Stack& results) {
  return saved_statistics(arguments, 4, Training, results);
}

// oneDNN's gradients of a recurrent layer are float32 whatever its type is.
bool onednn_rnn_backward(Arguments, torch::jit::Stack& results) {
  for (c10::IValue& result : results) {
    const at::Tensor& gradient = result.toTensor();
    result = at::detail::empty_strided_meta(gradient.sizes(), gradient.strides(), c10::kFloat);
  }
  return true;
}

// (self, target, reduction). One row has one loss, which is no list of one.
bool multilabel_margin_loss(Arguments arguments, torch::jit::Stack& results) {
  if (tensor(arguments[0]).dim() > 1) return true;
  results[0] = at::detail::empty_meta({}, tensor(results[0]).scalar_type());
  return true;
}

// (query, ...). The sums of exponentials have the type that the kernel computes in.
bool attention_on_host(Arguments arguments, torch::jit::Stack& results) {
  const c10::ScalarType type = at::toOpMathType(arguments[0].toTensor().scalar_type());
  const at::Tensor& sums = results[1].toTensor();
  results[1] = at::detail::empty_strided_meta(sums.sizes(), sums.strides(), type);
  return true;
}

// embedding_bag's number of the mode that adds.
constexpr int64_t kSum = 0;

// (weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
//  include_last_offset, padding_idx). Sums of bfloat16 take the way that needs no bags of offsets,
// which Meta knows of the other types.
bool embedding_bag(Arguments arguments, torch::jit::Stack& results) {
  const at::Tensor& weight = arguments[0].toTensor();
  const at::Tensor weights = tensor_or_none(arguments[6]);
  const bool fast = weight.scalar_type() == c10::kBFloat16 && arguments[4].toInt() == kSum &&
                    weight.stride(1) == 1 && arguments[8].toInt() < 0 &&
                    (!weights.defined() || weights.stride(0) == 1);
  if (on_host() && fast) {
    results[1] = at::detail::empty_meta({0}, results[1].toTensor().scalar_type());
  }
  return true;
}

// The same. Sums count the last offset as a bag in
// all they give beside the output, the other modes in nothing.
bool embedding_bag_forward_only(Arguments arguments, torch::jit::Stack& results) {
  if (!on_host()) return true;
  embedding_bag(arguments, results);
  const at::Tensor& sizes = results[2].toTensor();
  if (arguments[4].toInt() == kSum) {
    results[3] = at::detail::empty_meta(sizes.sizes(), sizes.scalar_type());
  } else {
    results[2] = at::detail::empty_meta({results[0].toTensor().size(0)}, sizes.scalar_type());
  }
  return true;
}

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
bool complex(Arguments arguments, torch::jit::Stack&) {
  const c10::ScalarType part = arguments[0].toTensor().scalar_type();
  if (arguments[1].toTensor().scalar_type() != part) return false;
  return arguments.size() < 3 || arguments[2].toTensor().scalar_type() == c10::toComplexType(part);
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

// ---- only refusals: what Meta accepts and eager raises for -------------------------------------

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

// (self, ...)
bool is_real_or_complex(Arguments arguments, torch::jit::Stack&) {
  return tensor(arguments[0]).is_floating_point() || tensor(arguments[0]).is_complex();
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

// CPU kernels lack most arithmetic on complex halves.
bool not_complex_half(Arguments, torch::jit::Stack& results) {
  return !on_host() || tensor(results[0]).scalar_type() != c10::kComplexHalf;
}

// (self)
bool not_bool(Arguments arguments, torch::jit::Stack&) { return !is_bool(arguments[0]); }
bool not_complex(Arguments arguments, torch::jit::Stack&) {
  return !tensor(arguments[0]).is_complex();
}

// What Meta computes into may be lazily conjugated by eager, which only a direct call tells.
bool never(Arguments, torch::jit::Stack&) { return false; }

void register_refusals() {
  using record::install_meta_rule;
  for (const char* name : {"aten::sort", "aten::argsort", "aten::cummax", "aten::cummin"}) {
    install_meta_rule(name, &has_dim<1>);
  }
  install_meta_rule("aten::sort.stable", &has_dim<2>);
  install_meta_rule("aten::argsort.stable", &has_dim<2>);
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
  install_meta_rule("aten::linalg_lu_solve.out", &never);
  for (const char* name : {"aten::put", "aten::put_"}) install_meta_rule(name, &put);
  for (const char* name : {"aten::masked_fill.Scalar", "aten::masked_fill.Tensor",
                           "aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor"}) {
    install_meta_rule(name, &masked_fill);
  }
  for (const char* name : {"aten::std", "aten::std.dim", "aten::std.correction", "aten::var",
                           "aten::var.dim", "aten::var.correction", "aten::std_mean.correction",
                           "aten::var_mean.correction", "aten::ldexp_"}) {
    install_meta_rule(name, &is_real_or_complex);
  }
  for (const char* name : {"aten::heaviside", "aten::heaviside_", "aten::polar"}) {
    install_meta_rule(name, &same_types);
  }
  for (const char* name : {"aten::add.Tensor", "aten::add_.Tensor"}) {
    install_meta_rule(name, &add_or_subtract);
  }
  for (const char* name : {"aten::sub.Tensor", "aten::sub_.Tensor", "aten::rsub.Tensor"}) {
    install_meta_rule(name, &subtract);
  }
  for (const char* name : {"aten::pow.Tensor_Scalar", "aten::pow_.Scalar"}) {
    install_meta_rule(name, &power);
  }
  for (const char* name : {"aten::sum", "aten::sum.dim_IntList", "aten::div.Tensor"}) {
    install_meta_rule(name, &not_complex_half);
  }
  for (const char* name : {"aten::relu", "aten::relu_"}) install_meta_rule(name, &not_bool);
  for (const char* name : {"aten::floor", "aten::floor_", "aten::ceil", "aten::ceil_",
                           "aten::trunc", "aten::trunc_"}) {
    install_meta_rule(name, &not_complex);
  }
}

}  // namespace

void register_meta_rules() {
  register_refusals();
  using record::install_meta_rule;
  install_meta_rule("aten::convolution", &convolution);
  install_meta_rule("aten::convolution_backward", &convolution_backward);
  install_meta_rule("aten::max_unpool2d", &max_unpool2d);
  install_meta_rule("aten::_fft_r2c", &fft_r2c);
  install_meta_rule("aten::_fft_c2c", &fft_c2c);
  install_meta_rule("aten::_fft_c2r", &fft_c2r);
  install_meta_rule("aten::native_batch_norm", &batch_norm);
  install_meta_rule("aten::_native_batch_norm_legit", &batch_norm);
  install_meta_rule("aten::_native_batch_norm_legit.no_stats", &batch_norm_no_stats);
  install_meta_rule("aten::_batch_norm_with_update", &batch_norm_fixed<true>);
  install_meta_rule("aten::_batch_norm_no_update", &batch_norm_fixed<false>);
  install_meta_rule("aten::mkldnn_rnn_layer_backward", &onednn_rnn_backward);
  install_meta_rule("aten::multilabel_margin_loss_forward", &multilabel_margin_loss);
  install_meta_rule("aten::_scaled_dot_product_flash_attention_for_cpu", &attention_on_host);
  install_meta_rule("aten::_embedding_bag", &embedding_bag);
  install_meta_rule("aten::_embedding_bag_forward_only", &embedding_bag_forward_only);
  install_meta_rule("aten::native_batch_norm.out", &batch_norm_out);
  install_meta_rule("aten::native_group_norm", &group_norm);
  install_meta_rule("aten::log_sigmoid_forward", &log_sigmoid);
  install_meta_rule("aten::roll", &roll);
  for (const char* name :
       {"aten::logical_and", "aten::logical_or", "aten::logical_xor", "aten::copysign.Tensor",
        "aten::floor_divide", "aten::remainder.Tensor", "aten::fmod.Tensor", "aten::nan_to_num"}) {
    install_meta_rule(name, &pointwise);
  }
  install_meta_rule("aten::gelu", &gelu);
  install_meta_rule("aten::complex", &complex);
  install_meta_rule("aten::complex.out", &complex);
  install_meta_rule("aten::masked_scatter", &masked_scatter);
  install_meta_rule("aten::masked_scatter_", &masked_scatter_);
  install_meta_rule("aten::aminmax.out", &aminmax_out);
  install_meta_rule("aten::avg_pool3d", &avg_pool3d);
  install_meta_rule("aten::index_add", &index_add);
  install_meta_rule("aten::index_add.out", &index_add);
  install_meta_rule("aten::index_add_", &index_add);
  install_meta_rule("aten::bucketize.Tensor", &bucketize);
}

}  // namespace acc::aten
