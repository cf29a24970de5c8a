#include "csrc/aten/strides.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/ConvUtils.h>

#include "csrc/aten/geometry.h"
#include "lazy/record/infer.h"

namespace acc::aten {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

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

c10::SymIntArrayRef ints(const std::vector<c10::SymInt>& values) { return values; }

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

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
void convolution(Arguments arguments, torch::jit::Stack& results) {
  restride(results[0],
           convolution_format(arguments[0].toTensor(), arguments[1].toTensor(),
                              tensor_or_none(arguments[2]), arguments.slice(3), std::nullopt));
}

// (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
//  groups, output_mask)
void convolution_backward(Arguments arguments, torch::jit::Stack& results) {
  const std::vector<c10::SymInt> bias_sizes =
      arguments[3].isNone() ? std::vector<c10::SymInt>() : arguments[3].toSymIntVector();
  const auto format = convolution_format(
      arguments[1].toTensor(), arguments[2].toTensor(), at::Tensor(), arguments.slice(4),
      arguments[3].isNone() ? at::OptionalSymIntArrayRef()
                            : at::OptionalSymIntArrayRef(c10::SymIntArrayRef(bias_sizes)));
  restride(results[0], format);
  restride(results[1], format);
}

}  // namespace

void register_stride_rules() {
  record::install_stride_rule("aten::convolution", &convolution);
  record::install_stride_rule("aten::convolution_backward", &convolution_backward);
}

}  // namespace acc::aten
