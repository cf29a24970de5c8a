#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

// Attention with dropout in one kernel, [batch, heads, length, size]: CUDA's flash attention, or
// the memory-efficient one. What is dropped is drawn by a generator that is not ours, from where
// base::other_generator_stream(seed, offset) says; `philox`, int64 [2], is the same, for work that
// is captured. So is what the backward drops once more. The kernels are in attention_cuda.cpp; a
// host has none.
namespace acc::library {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

TORCH_LIBRARY_FRAGMENT(acc, m) {
  const std::vector<at::Tag> random = {at::Tag::nondeterministic_seeded};
  // The result, and the logarithms of the softmax's sums.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, float dropout_p, "
      "bool is_causal, float? scale, bool flash, Tensor philox, int seed, int offset) "
      "-> (Tensor, Tensor)",
      random);
  // Those of query, key, value, and of the bias where it is wanted.
  m.def(
      "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias, "
      "Tensor out, Tensor sums, float dropout_p, bool of_bias, bool is_causal, float? scale, "
      "bool flash, Tensor philox, int seed, int offset) -> (Tensor, Tensor, Tensor, Tensor)",
      random);
}

// Flash attention lays out what it makes as what it is given, the other one in the order of batch,
// length, heads, size.
Tensor made_of(const Tensor& operand, c10::IntArrayRef sizes, bool flash) {
  if (flash && operand.sizes() == sizes) {
    const bool dense = operand.is_non_overlapping_and_dense();
    const auto strides = dense ? operand.strides().vec()
                               : at::infer_dense_strides(operand.sizes(), operand.strides());
    return at::detail::empty_strided_meta(sizes, strides, operand.scalar_type());
  }
  const int64_t heads = sizes[1], length = sizes[2], size = sizes[3];
  const std::array<int64_t, 4> strides{length * heads * size, size, heads * size, 1};
  return at::detail::empty_strided_meta(sizes, strides, operand.scalar_type());
}

std::tuple<Tensor, Tensor> attention_meta(const Tensor& query, const Tensor&, const Tensor& value,
                                          const OptionalTensor&, double, bool,
                                          std::optional<double>, bool flash, const Tensor&, int64_t,
                                          int64_t) {
  constexpr int64_t kWhole = 32;  // queries, in the sums of the memory-efficient one
  const int64_t length = query.size(2);
  const int64_t sums = flash ? length : (length + kWhole - 1) / kWhole * kWhole;
  return {made_of(query, {query.size(0), query.size(1), length, value.size(3)}, flash),
          at::detail::empty_meta({query.size(0), query.size(1), sums}, at::kFloat)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_meta(
    const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor&, const Tensor&, double, bool of_bias, bool,
    std::optional<double>, bool flash, const Tensor&, int64_t, int64_t) {
  return {made_of(query, query.sizes(), flash), made_of(key, key.sizes(), flash),
          made_of(value, value.sizes(), flash),
          of_bias ? at::detail::empty_meta(bias->sizes(), bias->scalar_type()) : Tensor()};
}

TORCH_LIBRARY_IMPL(acc, Meta, m) {
  m.impl("attention", &attention_meta);
  m.impl("attention_backward", &attention_backward_meta);
}

}  // namespace
}  // namespace acc::library
