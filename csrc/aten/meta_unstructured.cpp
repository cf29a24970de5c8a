#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/WrapDimUtilsMulti.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/RangeUtils.h>
#include <ATen/native/layer_norm.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include "csrc/aten/meta_install.h"

namespace acc::aten::meta {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using OptionalTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor make(c10::IntArrayRef sizes, c10::ScalarType type) {
  return at::detail::empty_meta(sizes, type);
}
Tensor like(const Tensor& tensor) { return make(tensor.sizes(), tensor.scalar_type()); }
Tensor like_if(bool wanted, const Tensor& tensor) { return wanted ? like(tensor) : Tensor(); }

bool of_one_type_on_host(Arguments arguments) { return on_host() && one_floating_type(arguments); }

// ---- what is given back ------------------------------------------------------------------------

Tensor& fill(Tensor& self, const at::Scalar&) { return self; }
Tensor& zero(Tensor& self) { return self; }

Tensor& arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step,
               Tensor& out) {
  const int64_t length = out.scalar_type() == at::kLong
                             ? at::native::compute_arange_size<int64_t>(start, end, step)
                             : at::native::compute_arange_size<double>(start, end, step);
  if (out.numel() != length) record::resize_result(out, {length}, {1});
  return out;
}

Tensor& arange_to(const at::Scalar& end, Tensor& out) { return arange(0, end, 1, out); }

// The updates of all parameters in one call: nothing is new. PyTorch has Meta kernels for those of
// Adam only.
void fused_sgd(at::TensorList, at::TensorList, at::TensorList, double, double, double, double, bool,
               bool, bool, const OptionalTensor&, const OptionalTensor&) {}
void fused_adagrad(at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double,
                   double, double, bool, const OptionalTensor&, const OptionalTensor&) {}

// Lists of as many tensors each as the first. Momenta, say, may be an empty list.
bool equally_many(Arguments arguments) {
  const size_t count = arguments[0].toListRef().size();
  return std::ranges::all_of(arguments, [count](const c10::IValue& argument) {
    return !argument.isList() || argument.toListRef().empty() ||
           argument.toListRef().size() == count;
  });
}

// ---- geometry ----------------------------------------------------------------------------------

// Joined along the new dimension, which is then split; a last one is made first.
Tensor stack(at::TensorList tensors, int64_t dim) {
  TORCH_CHECK(!tensors.empty(), "stack expects a non-empty TensorList");
  const Tensor& first = tensors[0];
  dim = at::maybe_wrap_dim(dim, first.dim() + 1);
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.sizes() == first.sizes(), "stack expects each tensor to be equal size");
    TORCH_CHECK(tensor.is_meta(), "a number of the CPU is no operand");
  }
  if (dim == first.dim()) {
    std::vector<Tensor> items;
    for (const Tensor& tensor : tensors) items.push_back(tensor.unsqueeze(dim));
    return at::meta::cat(items, dim);
  }
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes.insert(sizes.begin() + dim, static_cast<int64_t>(tensors.size()));
  return at::meta::cat(tensors, dim).view(sizes);
}

// A copy that keeps the order of dimensions.
Tensor copy_of(const Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), record::strides_of_copy(tensor),
                                        tensor.scalar_type());
}

Tensor flip(const Tensor& self, c10::IntArrayRef dims) {
  at::dim_list_to_bitset(dims, static_cast<size_t>(self.dim()));
  return copy_of(self);
}

// The CPU joins two slices, of which one may be empty.
Tensor rolled_along(const Tensor& self, int64_t shift, int64_t dim) {
  const int64_t length = self.size(dim);
  if (self.numel() == 0) return copy_of(self);
  const bool joined = on_host() && shift % length != 0;
  return at::detail::empty_meta(
      self.sizes(), self.scalar_type(),
      joined ? self.suggest_memory_format() : c10::MemoryFormat::Contiguous);
}
Tensor roll(const Tensor& self, SymIntArrayRef shifts, c10::IntArrayRef dims) {
  const auto steps = C10_AS_INTARRAYREF_SLOW(shifts);
  if (dims.empty()) {
    TORCH_CHECK(steps.size() == 1, "a shift for all");
    return like(self);
  }
  TORCH_CHECK(dims.size() == steps.size(), "a shift per dimension");
  Tensor rolled = self;
  for (size_t i = 0; i < dims.size(); ++i) rolled = rolled_along(rolled, steps[i], dims[i]);
  return rolled;
}

Tensor repeat(const Tensor& self, SymIntArrayRef repeats) {
  const auto times = C10_AS_INTARRAYREF_SLOW(repeats);
  TORCH_CHECK(std::ssize(times) >= self.dim(), "a number per dimension");
  std::vector<int64_t> sizes = times.vec();
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(sizes[i] >= 0, "repeated less than never");
    const int64_t dim = static_cast<int64_t>(i) - (std::ssize(times) - self.dim());
    if (dim >= 0) sizes[i] *= self.size(dim);
  }
  return make(sizes, self.scalar_type());
}

// The gradients of slices: of all that they are taken from.
Tensor select_backward(const Tensor& grad_output, SymIntArrayRef sizes, int64_t,
                       const c10::SymInt&) {
  return make(C10_AS_INTARRAYREF_SLOW(sizes), grad_output.scalar_type());
}
Tensor slice_backward(const Tensor& grad_output, SymIntArrayRef sizes, int64_t, const c10::SymInt&,
                      const c10::SymInt&, const c10::SymInt&) {
  return make(C10_AS_INTARRAYREF_SLOW(sizes), grad_output.scalar_type());
}

// (condition, self, other)
bool chooses_plainly(Arguments arguments) {
  return tensor(arguments[0]).scalar_type() == at::kBool &&
         tensor(arguments[1]).scalar_type() == tensor(arguments[2]).scalar_type();
}
Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), self.sizes()), other.sizes());
  return at::detail::empty_strided_meta(sizes, record::pointwise_strides({condition, self, other}),
                                        self.scalar_type());
}

// (self, mask, value). A copy in plain order, of the shape of both.
bool fills_plainly(Arguments arguments) {
  return tensor(arguments[1]).scalar_type() == at::kBool && !arguments[2].toScalar().isComplex();
}
Tensor masked_fill(const Tensor& self, const Tensor& mask, const at::Scalar&) {
  return make(at::infer_size(self.sizes(), mask.sizes()), self.scalar_type());
}

// ---- reductions --------------------------------------------------------------------------------

Tensor variance(const Tensor& self, at::OptionalIntArrayRef dim, const std::optional<at::Scalar>&,
                bool keepdim) {
  return at::meta::mean(self, dim, keepdim, std::nullopt);
}
Two variance_and_mean(const Tensor& self, at::OptionalIntArrayRef dim,
                      const std::optional<at::Scalar>& correction, bool keepdim) {
  return {variance(self, dim, correction, keepdim), variance(self, dim, correction, keepdim)};
}
Tensor logsumexp(const Tensor& self, c10::IntArrayRef dim, bool keepdim) {
  return at::meta::sum(self, dim, keepdim, std::nullopt);
}

// ---- losses and tables -------------------------------------------------------------------------

Tensor mse_loss_backward(const Tensor&, const Tensor& self, const Tensor&, int64_t) {
  return like(self);
}
// (grad_output, self, target, reduction)
bool loss_of_one_shape(Arguments arguments) {
  return of_one_type_on_host(arguments) &&
         tensor(arguments[1]).sizes() == tensor(arguments[2]).sizes();
}

// (self, target, weight, pos_weight, reduction)
bool is_reduced(Arguments arguments) {
  return one_floating_type(arguments) && arguments[4].toInt() != at::Reduction::None;
}
Tensor binary_cross_entropy(const Tensor& self, const Tensor& target, const OptionalTensor& weight,
                            const OptionalTensor& pos_weight, int64_t) {
  TORCH_CHECK(self.sizes() == target.sizes(), "a target for each");
  for (const OptionalTensor& factor : {weight, pos_weight}) {
    TORCH_CHECK(!factor.has_value() || !factor->defined() ||
                    at::is_expandable_to(factor->sizes(), self.sizes()),
                "weights of another shape");
  }
  return make({}, self.scalar_type());
}

Two log_sigmoid(const Tensor& self) { return {like(self), like(self)}; }

bool are_indices(const Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}
// (weight, indices, ...): a row of the table per index.
bool looks_up(Arguments arguments) {
  return tensor(arguments[0]).dim() == 2 && are_indices(tensor(arguments[1]));
}
Tensor embedding(const Tensor& weight, const Tensor& indices, const c10::SymInt&, bool, bool) {
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return make(sizes, weight.scalar_type());
}
// (grad_output, indices, ...)
bool adds_up(Arguments arguments) {
  return tensor(arguments[0]).dim() > 0 && are_indices(tensor(arguments[1]));
}
Tensor embedding_backward(const Tensor& grad_output, const Tensor&, const c10::SymInt& rows,
                          const c10::SymInt&, bool) {
  return make({rows.expect_int(), grad_output.size(-1)}, grad_output.scalar_type());
}

// ---- normalisations ----------------------------------------------------------------------------

// input [*stat, *normalized] -> normalised like it, mean and rstd [*stat, 1, ...]
Three layer_norm(const Tensor& input, SymIntArrayRef normalized, const OptionalTensor& weight,
                 const OptionalTensor& bias, double) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(normalized);
  at::native::_check_layer_norm_inputs(input, shape, weight.value_or(Tensor()),
                                       bias.value_or(Tensor()));
  std::vector<int64_t> stat = input.sizes().vec();
  std::fill(stat.end() - static_cast<int64_t>(shape.size()), stat.end(), 1);
  const c10::ScalarType own = input.scalar_type();
  const c10::ScalarType type = on_host() ? own : at::toOpMathType(own);  // a GPU keeps float32
  return {like(input), make(stat, type), make(stat, type)};
}
Three layer_norm_backward(const Tensor&, const Tensor& input, SymIntArrayRef, const Tensor&,
                          const Tensor&, const OptionalTensor& weight, const OptionalTensor& bias,
                          std::array<bool, 3> wanted) {
  return {like_if(wanted[0], input), like_if(wanted[1], weight.value_or(Tensor())),
          like_if(wanted[2], bias.value_or(Tensor()))};
}

// (input [N, C, *], ...). The rules know the layouts and the types of statistics.
bool has_channels(Arguments arguments) {
  const Tensor& input = tensor(arguments[0]);
  return on_host() && input.is_floating_point() && input.dim() >= 2;
}
Three batch_norm(const Tensor& input, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, bool, double, double) {
  const auto statistics = [&] { return make({input.size(1)}, input.scalar_type()); };
  return {like(input), statistics(), statistics()};
}
Three group_norm(const Tensor& input, const OptionalTensor&, const OptionalTensor&,
                 const c10::SymInt& rows, const c10::SymInt& channels, const c10::SymInt& size,
                 int64_t groups, double) {
  TORCH_CHECK(groups > 0 && channels % groups == 0 && rows * channels * size == input.numel(),
              "as many channels in each group, and all elements");
  const auto statistics = [&] { return make({rows.expect_int(), groups}, input.scalar_type()); };
  return {like(input), statistics(), statistics()};
}
// (grad_output, input, ...): there is a weight, or no gradient of one is wanted.
template <size_t kWeight>
bool has_scale(Arguments arguments) {
  const auto wanted = arguments.back().toBoolList();
  return of_one_type_on_host(arguments) &&
         (tensor_or_none(arguments[kWeight]).defined() || !(wanted[1] || wanted[2]));
}
Three group_norm_backward(const Tensor&, const Tensor& input, const Tensor&, const Tensor&,
                          const OptionalTensor& weight, const c10::SymInt&, const c10::SymInt&,
                          const c10::SymInt&, int64_t, std::array<bool, 3> wanted) {
  const Tensor scale = weight.value_or(Tensor());
  const Tensor gradient =
      at::detail::empty_meta(input.sizes(), input.scalar_type(), input.suggest_memory_format());
  return {wanted[0] ? gradient : Tensor(), like_if(wanted[1], scale), like_if(wanted[2], scale)};
}
Three batch_norm_backward(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                          const OptionalTensor&, bool, double, std::array<bool, 3> wanted) {
  const Tensor scale = weight.value_or(Tensor());
  return {like_if(wanted[0], input), like_if(wanted[1], scale), like_if(wanted[2], scale)};
}

// ---- convolutions ------------------------------------------------------------------------------

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups): a plain
// call that no kernel refuses. Layouts are what the rules say.
bool convolves(Arguments arguments) {
  if (!one_floating_type(arguments)) return false;
  const Tensor& input = tensor(arguments[0]);
  const Tensor& weight = tensor(arguments[1]);
  const Tensor bias = tensor_or_none(arguments[2]);
  const auto stride = arguments[3].toIntVector();
  const auto padding = arguments[4].toIntVector();
  const auto dilation = arguments[5].toIntVector();
  const bool transposed = arguments[6].toBool();
  const auto output_padding = arguments[7].toIntVector();
  const int64_t groups = arguments[8].toInt();
  const auto positive = [](int64_t n) { return n > 0; };
  if (input.dim() < 3 || weight.dim() != input.dim() || groups < 1 ||
      !std::ranges::all_of(input.sizes(), positive) ||
      !std::ranges::all_of(weight.sizes(), positive)) {
    return false;
  }
  const int64_t in = input.size(1);
  if (in != (transposed ? weight.size(0) : weight.size(1) * groups)) return false;
  if ((transposed ? in : weight.size(0)) % groups != 0) return false;
  const int64_t out = transposed ? weight.size(1) * groups : weight.size(0);
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != out)) return false;
  const auto spatial = static_cast<size_t>(input.dim() - 2);
  if (stride.size() != spatial || padding.size() != spatial || dilation.size() != spatial ||
      (transposed && output_padding.size() != spatial)) {
    return false;
  }
  for (size_t i = 0; i < spatial; ++i) {
    if (stride[i] < 1 || padding[i] < 0 || dilation[i] < 1) return false;
    const auto dim = static_cast<int64_t>(i) + 2;
    const int64_t kernel = dilation[i] * (weight.size(dim) - 1) + 1;
    if (!transposed && input.size(dim) + 2 * padding[i] < kernel) return false;
    if (transposed &&
        (output_padding[i] < 0 || output_padding[i] >= std::max(stride[i], dilation[i]) ||
         (input.size(dim) - 1) * stride[i] - 2 * padding[i] + kernel + output_padding[i] < 1)) {
      return false;
    }
  }
  return true;
}
Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  const auto sizes =
      transposed
          ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding,
                                        stride, dilation, groups)
          : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  return make(sizes, input.scalar_type());
}

// (grad_output, input, weight, bias_sizes, ...)
Three convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           at::OptionalIntArrayRef bias_sizes, c10::IntArrayRef, c10::IntArrayRef,
                           c10::IntArrayRef, bool, c10::IntArrayRef, int64_t,
                           std::array<bool, 3> wanted) {
  TORCH_CHECK(!wanted[2] || bias_sizes.has_value(), "a gradient of no bias");
  return {like_if(wanted[0], input), like_if(wanted[1], weight),
          wanted[2] ? make(*bias_sizes, grad_output.scalar_type()) : Tensor()};
}

// ---- flash attention: [batch, heads, length, size] ---------------------------------------------

// Memory in the order of batch, length, heads, size.
Tensor by_position(c10::IntArrayRef sizes, c10::ScalarType type) {
  const int64_t heads = sizes[1], length = sizes[2], size = sizes[3];
  return at::detail::empty_strided_meta(sizes, {length * heads * size, size, heads * size, 1},
                                        type);
}
bool has_four_dimensions(Arguments arguments) {
  return one_floating_type(arguments.slice(0, 3)) &&
         std::ranges::all_of(arguments.slice(0, 3), [](const c10::IValue& value) {
           return tensor(value).dim() == 4 && tensor(value).numel() > 0;
         });
}
Two attention(const Tensor& query, const Tensor&, const Tensor&, double, bool,
              const OptionalTensor&, std::optional<double>) {
  const int64_t heads = query.size(1), length = query.size(2);
  const int64_t of_head = on_host() ? 1 : length, of_position = on_host() ? heads : 1;
  const Tensor sums = at::detail::empty_strided_meta(
      {query.size(0), heads, length}, {length * heads, of_head, of_position}, at::kFloat);
  return {copy_of(query), sums};
}
Three attention_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor&, const Tensor&, double, bool, const OptionalTensor&,
                         std::optional<double>) {
  const auto gradient = [](const Tensor& of) {
    return on_host() ? by_position(of.sizes(), of.scalar_type()) : copy_of(of);
  };
  return {gradient(query), gradient(key), gradient(value)};
}

}  // namespace

void register_unstructured() {
  install("aten::fill_.Scalar", &fill);
  install("aten::zero_", &zero);
  install("aten::zero", &copy_of);
  install("aten::arange.start_out", &arange);
  install("aten::arange.out", &arange_to);
  install("aten::_fused_sgd_", &fused_sgd, &equally_many);
  install("aten::_fused_adagrad_", &fused_adagrad, &equally_many);
  install("aten::stack", &stack);
  install("aten::flip", &flip);
  install("aten::roll", &roll);
  install("aten::repeat", &repeat);
  install("aten::select_backward", &select_backward);
  install("aten::slice_backward", &slice_backward);
  install("aten::where.self", &where, &chooses_plainly);
  install("aten::masked_fill.Scalar", &masked_fill, &fills_plainly);
  install("aten::var.correction", &variance, &one_floating_type);
  install("aten::std.correction", &variance, &one_floating_type);
  install("aten::var_mean.correction", &variance_and_mean, &one_floating_type);
  install("aten::logsumexp", &logsumexp, &one_floating_type);
  install("aten::mse_loss_backward", &mse_loss_backward, &loss_of_one_shape);
  install("aten::binary_cross_entropy_with_logits", &binary_cross_entropy, &is_reduced);
  install("aten::log_sigmoid_forward", &log_sigmoid, &of_one_type_on_host);
  install("aten::embedding", &embedding, &looks_up);
  install("aten::embedding_dense_backward", &embedding_backward, &adds_up);
  install("aten::native_layer_norm", &layer_norm, &one_floating_type);
  install("aten::native_layer_norm_backward", &layer_norm_backward, &one_floating_type);
  install("aten::native_batch_norm", &batch_norm, &has_channels);
  install("aten::native_group_norm", &group_norm, &has_channels);
  install("aten::native_group_norm_backward", &group_norm_backward, &has_scale<4>);
  install("aten::native_batch_norm_backward", &batch_norm_backward, &has_scale<2>);
  install("aten::convolution", &convolution, &convolves);
  install("aten::convolution_backward", &convolution_backward, &one_floating_type);
  install("aten::_scaled_dot_product_flash_attention_for_cpu", &attention, &has_four_dimensions);
  install("aten::_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward,
          &has_four_dimensions);
}

}  // namespace acc::aten::meta
