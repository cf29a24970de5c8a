#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "csrc/aten/geometry.h"
#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "lazy/record/infer.h"

// scaled_dot_product_attention asks which fused kernel a device has; the answer is the one that
// ATen gives for the device below.
namespace acc::aten {
namespace {

// CUDA's choice, or what stands in for it.
int64_t recordable(int64_t choice, const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout_p,
                   bool is_causal) {
  constexpr auto kMath = static_cast<int64_t>(sdp::SDPBackend::math);
  constexpr auto kFlash = static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  constexpr auto kEfficient = static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  // Kernels with dropout inside draw from CUDA's own generator, which neither torch.manual_seed nor
  // a checkpoint knows of here, and say where they were in it on the host or on the GPU, depending
  // on whether they are captured.
  if (dropout_p > 0) return kMath;
  if (choice == kMath || choice == kEfficient) return choice;
  // The others are for half types. ATen pads heads to whole words of 16 bytes for CUDA's own
  // tensors alone.
  const int64_t size = query.size(-1);
  const bool aligned = size % 8 == 0 && value.size(-1) % 8 == 0;
  if (!aligned) return kMath;
  if (choice == kFlash) return kFlash;
  // cuDNN's returns numbers beside its tensors, and takes what others do not: other heads of keys
  // than of values, and causal masks of rectangles, which flash attention aligns at the other end.
  if (key.size(-3) != value.size(-3)) return kMath;
  constexpr int64_t kLargestHead = 192;  // of which every GPU computes gradients
  const bool square = query.size(-2) == key.size(-2);
  const bool no_mask = !mask.has_value() || !mask->defined();
  if (no_mask && (square || !is_causal) && size == value.size(-1) && size <= kLargestHead) {
    return kFlash;
  }
  // The efficient one takes no fewer heads of keys than of queries.
  return query.size(-3) == key.size(-3) ? kEfficient : kMath;
}

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
               std::optional<double> scale, bool enable_gqa) {
  // Dispatch modes (a compiler's fake tensors) are asked about the program's tensors, not these.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  // While a compiler traces sizes that may change, any answer will do: the program asks again.
  const auto symbolic = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  if (symbolic(query) || symbolic(key) || symbolic(value) ||
      (mask.has_value() && symbolic(*mask))) {
    return static_cast<int64_t>(sdp::SDPBackend::math);
  }
  const auto like = [](const at::Tensor& tensor) {
    at::Tensor made = geometry_only(tensor);
    if (made.defined() && tensor.requires_grad()) made.set_requires_grad(true);
    return made;
  };
  const std::optional<at::Tensor> mask_like =
      mask.has_value() ? std::optional<at::Tensor>(like(*mask)) : std::nullopt;
  const int64_t choice = at::_fused_sdp_choice(like(query), like(key), like(value), mask_like,
                                               dropout_p, is_causal, scale, enable_gqa);
  return runtime::on_host() ? choice
                            : recordable(choice, query, key, value, mask, dropout_p, is_causal);
}

// nn.TransformerEncoder makes a nested tensor of a padded batch when this holds. There are none on
// acc, and without one it computes the padding too.
bool mask_is_left_aligned(const at::Tensor&, const at::Tensor&) { return false; }

// Flash attention on a GPU. ATen calls the CPU's operator on other devices than CUDA's, so this is
// what acc records there, too; no program has CUDA tensors run it. Without dropout there is nothing
// to keep of the state of a generator.

using OptionalTensor = std::optional<at::Tensor>;

// In the memory that Meta has promised: as a copy of `other` would be.
at::Tensor laid_out_like(const at::Tensor& other, const at::Tensor& tensor) {
  const std::vector<int64_t> strides = record::strides_of_copy(other);
  if (tensor.strides() == c10::IntArrayRef(strides)) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

std::tuple<at::Tensor, at::Tensor> flash_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, double dropout_p,
                                                   bool is_causal, const OptionalTensor& mask,
                                                   std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0 && !(mask.has_value() && mask->defined()),
              "[attention] flash attention on a GPU takes no mask and no dropout here");
  const auto made = at::_scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal,
                                                            /*return_debug_mask=*/false, scale);
  return {laid_out_like(query, std::get<0>(made)), std::get<1>(made).contiguous()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& sums, double, bool is_causal,
    const OptionalTensor&, std::optional<double> scale) {
  const at::Tensor none;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
      gradient, query, key, value, out, sums, none, none, query.size(2), key.size(2), 0.0,
      is_causal, none, none, scale);
  return {laid_out_like(query, of_query), laid_out_like(key, of_key),
          laid_out_like(value, of_value)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_tensor_from_mask_left_aligned", &mask_is_left_aligned);
}

}  // namespace
}  // namespace acc::aten

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &acc::aten::choose)
}  // namespace at::native
