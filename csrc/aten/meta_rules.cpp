#include "csrc/aten/meta_rules.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/native/ConvUtils.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "csrc/aten/geometry.h"
#include "csrc/aten/meta_arguments.h"
#include "lazy/record/infer.h"

namespace acc::aten {
namespace {

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

// The layout that ATen's choice of convolution kernel works in.
c10::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight,
                                     const at::Tensor& bias, const Arguments& rest,
                                     at::OptionalSymIntArrayRef bias_sizes) {
  // One-dimensional convolutions copy their input into plain order and run as two-dimensional ones.
  const bool one_dimensional = input.dim() == 3;
  at::Tensor x = input;
  if (one_dimensional && !input.is_contiguous()) {
    x = at::detail::empty_meta(input.sizes(), input.scalar_type());
  }
  x = geometry_only(x);
  const at::Tensor w = geometry_only(weight);
  const at::Tensor b = geometry_only(bias);
  const auto stride = rest[0].toSymIntVector();
  const auto padding = rest[1].toSymIntVector();
  const auto dilation = rest[2].toSymIntVector();
  const auto output_padding = rest[4].toSymIntVector();
  const auto backend = at::native::select_conv_backend(
      x, w, b.defined() ? std::optional<at::Tensor>(b) : std::nullopt, ints(stride), ints(padding),
      ints(dilation), rest[3].toBool(), ints(output_padding), rest[5].toSymInt(), bias_sizes);
  if (one_dimensional) {
    return at::native::_determine_backend_memory_format(x.unsqueeze(2), w.unsqueeze(2), backend);
  }
  return at::native::_determine_backend_memory_format(x, w, backend);
}

// The result of a convolution that works in `format`.
void restride_convolved(c10::IValue& result, c10::MemoryFormat format) {
  restride(result, format);
  if (!result.isTensor() || !result.toTensor().defined()) return;
  const at::Tensor& tensor = result.toTensor();
  if (tensor.dim() != 3 || format != c10::MemoryFormat::ChannelsLast) return;
  const c10::IntArrayRef sizes = tensor.sizes();
  restride(result, {sizes[1] * sizes[2], 1, sizes[1]});
}

bool all_positive(const c10::IValue& value) {
  return std::ranges::all_of(value.toSymIntVector(), [](const c10::SymInt& n) { return n > 0; });
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
bool convolution(Arguments arguments, torch::jit::Stack& results) {
  if (!all_positive(arguments[5])) return false;
  restride_convolved(
      results[0],
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
  restride_convolved(results[0], format);
  restride_convolved(results[1], format);
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

// (input, weight, bias, N, C, HxW, group, eps)
bool group_norm(Arguments arguments, torch::jit::Stack& results) {
  if (!on_host()) return true;
  const at::Tensor& input = tensor(arguments[0]);
  const auto type = statistics_type(input, arguments.slice(1, 2));
  if (!type) return false;
  restride(results[0], input.suggest_memory_format());
  for (size_t i = 1; i <= 2; ++i) {
    results[i] = at::detail::empty_meta(tensor(results[i]).sizes(), *type);
  }
  return true;
}

// (input, normalized_shape, weight, bias, eps)
bool layer_norm(Arguments arguments, torch::jit::Stack&) {
  return !on_host() || statistics_type(tensor(arguments[0]), arguments.slice(2, 2)).has_value();
}

// The gradients of a norm: of the input, the weight and the bias, each in the type of what it is
// the gradient of. The CPU kernels want the statistics in the type of the weight.
bool norm_backward(const at::Tensor& input, const at::Tensor& mean, const c10::IValue& weight,
                   const c10::IValue& bias, torch::jit::Stack& results) {
  if (!on_host()) return true;
  const c10::IValue of[] = {input, weight, bias};
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor operand = tensor_or_none(of[i]);
    const at::Tensor gradient = tensor_or_none(results[i]);
    if (!operand.defined() || !gradient.defined()) continue;
    results[i] =
        at::detail::empty_strided_meta(gradient.sizes(), gradient.strides(), operand.scalar_type());
  }
  const at::Tensor scale = tensor_or_none(weight);
  return mean.scalar_type() == (scale.defined() ? scale : input).scalar_type();
}

// (grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)
bool group_norm_backward(Arguments arguments, torch::jit::Stack& results) {
  return norm_backward(tensor(arguments[1]), tensor(arguments[2]), arguments[4], arguments[4],
                       results);
}

// (grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
bool layer_norm_backward(Arguments arguments, torch::jit::Stack& results) {
  return norm_backward(tensor(arguments[1]), tensor(arguments[3]), arguments[5], arguments[6],
                       results);
}

// (v, g, dim). The CPU kernel keeps the norms of halves in float32.
bool weight_norm(Arguments arguments, torch::jit::Stack& results) {
  if (!on_host()) return true;
  if (!one_type(arguments)) return false;
  const at::Tensor& norms = tensor(results[1]);
  if (c10::isReducedFloatingType(tensor(arguments[0]).scalar_type())) {
    results[1] = at::detail::empty_strided_meta(norms.sizes(), norms.strides(), c10::kFloat);
  }
  return true;
}

// (self). A result and what its backward needs.
bool log_sigmoid(Arguments, torch::jit::Stack& results) {
  if (!on_host()) return true;
  restride(results[0], c10::MemoryFormat::Contiguous);
  restride(results[1], c10::MemoryFormat::Contiguous);
  return true;
}

// Pointwise operators whose Meta kernel is Python's and lays its result out otherwise.
bool pointwise(Arguments arguments, torch::jit::Stack& results) {
  restride(results[0], record::pointwise_strides(arguments));
  return true;
}

// (self, other). The product of the first and a power, which is in plain order.
bool ldexp(Arguments arguments, torch::jit::Stack& results) {
  const at::Tensor& other = tensor(arguments[1]);
  if (other.is_complex()) return false;
  if (other.dim() == 0 && c10::isReducedFloatingType(other.scalar_type())) return false;
  const at::Tensor power = at::detail::empty_meta(other.sizes(), tensor(results[0]).scalar_type());
  restride(results[0], record::pointwise_strides({arguments[0], power}));
  return true;
}

// As ATen's batch norm on the CPU chooses it: strides of dimensions of one element do not count.
c10::MemoryFormat normalised_format(const at::Tensor& input) {
  for (const auto format : {c10::MemoryFormat::Contiguous, c10::MemoryFormat::ChannelsLast,
                            c10::MemoryFormat::ChannelsLast3d}) {
    if (input.is_contiguous(format)) return format;
  }
  return input.suggest_memory_format();
}

// (input, and as many `parameters`: weight, bias and, where there are any, running statistics).
// What is saved for backward has no elements without training.
bool saved_statistics(Arguments arguments, size_t parameters, bool training,
                      torch::jit::Stack& results) {
  if (!on_host()) return true;
  const at::Tensor& input = arguments[0].toTensor();
  const auto type = statistics_type(input, arguments.slice(1, parameters));
  if (!type) return false;
  const int64_t channels = input.size(1);
  restride(results[0], normalised_format(input));
  for (size_t i = 1; i <= 2; ++i) {
    results[i] = at::detail::empty_meta({training ? channels : 0}, *type);
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

// (self, ...)
bool as_first(Arguments arguments, torch::jit::Stack& results) {
  if (on_host()) restride(results[0], tensor(arguments[0]).suggest_memory_format());
  return true;
}

// (grad_output, self, ...)
bool as_second(Arguments arguments, torch::jit::Stack& results) {
  if (on_host()) restride(results[0], tensor(arguments[1]).suggest_memory_format());
  return true;
}

bool contiguous(Arguments, torch::jit::Stack& results) {
  if (on_host()) restride(results[0], c10::MemoryFormat::Contiguous);
  return true;
}

// (grad_output, self, target, ...)
bool loss_backward(Arguments arguments, torch::jit::Stack& results) {
  return one_type(arguments) && contiguous(arguments, results);
}
bool binary_cross_entropy(Arguments arguments, torch::jit::Stack& results) {
  if (!one_type(arguments) || !tensor(arguments[1]).is_floating_point()) return false;
  if (tensor(results[0]).sizes() == tensor(arguments[0]).sizes()) {
    restride(results[0], record::pointwise_strides(arguments.slice(0, 1)));
  }
  return true;
}
bool binary_cross_entropy_backward(Arguments arguments, torch::jit::Stack& results) {
  restride(results[0], record::pointwise_strides(arguments.slice(1, 1)));
  return one_type(arguments);
}

// (self, target, reduction). One row has one loss, which is no list of one.
bool multilabel_margin_loss(Arguments arguments, torch::jit::Stack& results) {
  if (tensor(arguments[0]).dim() > 1) return true;
  results[0] = at::detail::empty_meta({}, tensor(results[0]).scalar_type());
  return true;
}

// (query, ...). The sums of exponentials have the type that the kernel computes in.
bool flash_attention(Arguments arguments, torch::jit::Stack& results) {
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
  if (!one_type(arguments)) return false;
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
  if (!embedding_bag(arguments, results)) return false;
  if (!on_host()) return true;
  const at::Tensor& sizes = results[2].toTensor();
  if (arguments[4].toInt() == kSum) {
    results[3] = at::detail::empty_meta(sizes.sizes(), sizes.scalar_type());
  } else {
    results[2] = at::detail::empty_meta({results[0].toTensor().size(0)}, sizes.scalar_type());
  }
  return true;
}

// (self, ...): a copy of self, laid out anew only where its elements share memory.
bool scatter(Arguments arguments, torch::jit::Stack& results) {
  const at::Tensor& self = tensor(arguments[0]);
  if (at::has_internal_overlap(self) != at::MemOverlap::Yes) return true;
  restride(results[0], at::infer_dense_strides(self.sizes(), self.strides()));
  return true;
}

// (self). The angles of complex numbers are written into a tensor that begins empty.
bool angle(Arguments arguments, torch::jit::Stack& results) {
  if (on_host() && tensor(arguments[0]).is_complex()) {
    restride(results[0], c10::MemoryFormat::Contiguous);
  }
  return true;
}

}  // namespace

void register_meta_rules() {
  register_meta_refusals();
  using record::install_meta_rule;
  for (const char* name :
       {"aten::select_scatter", "aten::slice_scatter", "aten::diagonal_scatter"}) {
    install_meta_rule(name, &scatter);
  }
  install_meta_rule("aten::angle", &angle);
  install_meta_rule("aten::ldexp.Tensor", &ldexp);
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
  install_meta_rule("aten::_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  install_meta_rule("aten::_embedding_bag", &embedding_bag);
  install_meta_rule("aten::_embedding_bag_forward_only", &embedding_bag_forward_only);
  install_meta_rule("aten::native_group_norm", &group_norm);
  for (const char* name :
       {"aten::reflection_pad2d", "aten::reflection_pad3d", "aten::replication_pad2d",
        "aten::replication_pad3d", "aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d",
        "aten::upsample_bilinear2d", "aten::_upsample_bilinear2d_aa", "aten::upsample_bicubic2d",
        "aten::_upsample_bicubic2d_aa", "aten::upsample_trilinear3d"}) {
    install_meta_rule(name, &as_first);
  }
  for (const char* name : {"aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward",
                           "aten::replication_pad2d_backward", "aten::replication_pad3d_backward",
                           "aten::native_batch_norm_backward", "aten::batch_norm_backward"}) {
    install_meta_rule(name, &as_second);
  }
  install_meta_rule("aten::native_channel_shuffle", &as_first);
  install_meta_rule("aten::channel_shuffle", &as_first);
  install_meta_rule("aten::glu_backward", &contiguous);
  for (const char* name :
       {"aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward"}) {
    install_meta_rule(name, &loss_backward);
  }
  install_meta_rule("aten::binary_cross_entropy", &binary_cross_entropy);
  install_meta_rule("aten::binary_cross_entropy_backward", &binary_cross_entropy_backward);
  install_meta_rule("aten::native_layer_norm", &layer_norm);
  install_meta_rule("aten::native_layer_norm_backward", &layer_norm_backward);
  install_meta_rule("aten::native_group_norm_backward", &group_norm_backward);
  install_meta_rule("aten::_weight_norm_interface", &weight_norm);
  install_meta_rule("aten::log_sigmoid_forward", &log_sigmoid);
  for (const char* name :
       {"aten::logical_and", "aten::logical_or", "aten::logical_xor", "aten::nan_to_num",
        "aten::heaviside", "aten::complex", "aten::polar", "aten::copysign.Tensor",
        "aten::logaddexp2", "aten::hardswish_backward", "aten::hardtanh_backward",
        "aten::logit_backward", "aten::special_xlog1py"}) {
    install_meta_rule(name, &pointwise);
  }
}

}  // namespace acc::aten
