#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

// Which operators autocast runs in which precision: PyTorch's own lists for CUDA. The macros expect
// to stand inside `at`.
namespace at {
namespace {

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                   int64_t) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy is unsafe under autocast: its logarithm overflows in half "
      "precision. Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the values "
      "before the sigmoid, or leave the autocast region for it.");
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define ACC_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define ACC_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define ACC_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define ACC_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(ACC_LOWER_PRECISION)
  AT_FORALL_FP32(ACC_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(ACC_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(ACC_PROMOTE)
#undef ACC_LOWER_PRECISION
#undef ACC_FP32
#undef ACC_FP32_SET_OPT_DTYPE
#undef ACC_PROMOTE
  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"),
         TORCH_FN((&refuse_binary_cross_entropy)));
}

}  // namespace
}  // namespace at
