#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "csrc/aten/geometry.h"
#include "csrc/runtime/backend.h"

// scaled_dot_product_attention asks which fused kernel a device has; the answer is the one that
// ATen gives for the device below.
namespace acc::aten {
namespace {

// CUDA's choice, or what stands in for it.
int64_t recordable(int64_t choice, const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, double dropout_p, bool enable_gqa) {
  constexpr auto kMath = static_cast<int64_t>(sdp::SDPBackend::math);
  constexpr auto kEfficient = static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  // Kernels with dropout inside draw from CUDA's own generator, which neither torch.manual_seed nor
  // a checkpoint knows of here, and say where they were in it on the host or on the GPU, depending
  // on whether they are captured.
  if (dropout_p > 0) return kMath;
  if (choice == kMath || choice == kEfficient) return choice;
  // ATen reaches its flash kernel on other devices only through the CPU's operator, and cuDNN's
  // returns numbers beside its tensors. The efficient one is called on the device it is asked for,
  // but takes no fewer heads of keys than of queries, and of half types (which the others are for)
  // only heads of whole words of 16 bytes.
  const bool grouped = enable_gqa && query.sym_size(-3) != key.sym_size(-3);
  const bool aligned = query.sym_size(-1) % 8 == 0 && value.sym_size(-1) % 8 == 0;
  return grouped || !aligned ? kMath : kEfficient;
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
  return runtime::on_host() ? choice : recordable(choice, query, key, value, dropout_p, enable_gqa);
}

// nn.TransformerEncoder makes a nested tensor of a padded batch when this holds. There are none on
// acc, and without one it computes the padding too.
bool mask_is_left_aligned(const at::Tensor&, const at::Tensor&) { return false; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_tensor_from_mask_left_aligned", &mask_is_left_aligned);
}

}  // namespace
}  // namespace acc::aten

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &acc::aten::choose)
}  // namespace at::native
