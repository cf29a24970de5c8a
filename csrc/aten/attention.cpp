#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/aten/fallback.h"
#include "csrc/aten/geometry.h"
#include "csrc/aten/record_kernel.h"
#include "csrc/aten/schema.h"
#include "csrc/base/check.h"
#include "csrc/base/philox.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/generator.h"
#include "lazy/record/infer.h"

// scaled_dot_product_attention asks which fused kernel a device has; the answer is the one that
// ATen gives for the device below.
namespace acc::aten {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kMath = static_cast<int64_t>(sdp::SDPBackend::math);
constexpr auto kFlash = static_cast<int64_t>(sdp::SDPBackend::flash_attention);
constexpr auto kEfficient = static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
constexpr int64_t kLargestHead = 192;  // of which flash attention computes gradients on every GPU

bool defined(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// CUDA's choice, or what stands in for it.
int64_t recordable(int64_t choice, const Tensor& query, const Tensor& key, const Tensor& value,
                   const OptionalTensor& mask, bool is_causal) {
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
  const bool square = query.size(-2) == key.size(-2);
  if (!defined(mask) && (square || !is_causal) && size == value.size(-1) && size <= kLargestHead) {
    return kFlash;
  }
  // The efficient one takes no fewer heads of keys than of queries.
  return query.size(-3) == key.size(-3) ? kEfficient : kMath;
}

// What CUDA's kernels ask for and its choice does not look at: eager's error there is one that
// plain products do not have.
bool kernels_accept(const Tensor& query, const Tensor& key, const Tensor& value,
                    const OptionalTensor& mask) {
  constexpr int64_t kMostBlocks = 65535;  // of a grid, in all dimensions but the first
  constexpr int64_t kWord = 16;           // bytes
  const auto aligned = [](const Tensor& tensor) {
    return tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) % kWord == 0;
  };
  if (query.numel() == 0 || std::max(query.size(0), query.size(-3)) > kMostBlocks) return false;
  if (!aligned(query) || !aligned(key) || !aligned(value)) return false;
  if (!defined(mask)) return true;
  if (mask->size(-1) != key.size(-2)) return false;  // one number for all keys of a query
  return mask->scalar_type() == at::kBool ||
         (mask->scalar_type() == query.scalar_type() && aligned(*mask));
}

// The same where there is dropout. Of plain products alone there are samples that draw apart
// (vmap), and forward derivatives; to drop all is 0 there, and more is an error.
int64_t choice_with_dropout(int64_t choice, const Tensor& query, const Tensor& key,
                            const Tensor& value, const OptionalTensor& mask, double dropout_p) {
  const std::array<Tensor, 4> all{query, key, value, mask.value_or(Tensor())};
  const bool plain = std::ranges::any_of(all, [](const Tensor& tensor) {
    return tensor.defined() &&
           (at::isTensorSubclassLike(tensor) || tensor._fw_grad(/*level=*/0).defined());
  });
  const bool transformed =
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchVmapMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
  if (plain || transformed || !(dropout_p > 0 && dropout_p < 1)) return kMath;
  if (choice != kFlash || query.size(-1) <= kLargestHead) return choice;
  return query.size(-3) == key.size(-3) ? kEfficient : kMath;
}

// What the device below has for these.
int64_t fused_choice(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  // Dispatch modes (a compiler's fake tensors) are asked about the program's tensors, not these.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  // While a compiler traces sizes that may change, any answer will do: the program asks again.
  const auto symbolic = [](const Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  if (symbolic(query) || symbolic(key) || symbolic(value) ||
      (mask.has_value() && symbolic(*mask))) {
    return kMath;
  }
  const auto like = [](const Tensor& tensor) {
    Tensor made = geometry_only(tensor);
    if (made.defined() && tensor.requires_grad()) made.set_requires_grad(true);
    return made;
  };
  const OptionalTensor mask_like = mask.has_value() ? OptionalTensor(like(*mask)) : std::nullopt;
  int64_t choice = at::_fused_sdp_choice(like(query), like(key), like(value), mask_like, dropout_p,
                                         is_causal, scale, enable_gqa);
  if (choice == kMath || (runtime::on_host() && dropout_p == 0)) return choice;
  if (!kernels_accept(query, key, value, mask)) return kMath;
  if (!runtime::on_host()) choice = recordable(choice, query, key, value, mask, is_causal);
  return dropout_p == 0 ? choice : choice_with_dropout(choice, query, key, value, mask, dropout_p);
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
               const OptionalTensor& mask, double dropout_p, bool is_causal,
               std::optional<double> scale, bool enable_gqa) {
  const int64_t choice =
      fused_choice(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  // What ATen calls for flash attention returns nothing of a generator: the other operator's
  // kernel, below, calls the one that was chosen.
  return choice == kFlash && dropout_p > 0 ? kEfficient : choice;
}

// nn.TransformerEncoder makes a nested tensor of a padded batch when this holds. There are none on
// acc, and without one it computes the padding too.
bool mask_is_left_aligned(const Tensor&, const Tensor&) { return false; }

// Flash attention on a GPU. ATen calls the CPU's operator on other devices than CUDA's, so this is
// what acc records there, too; no program has CUDA tensors run it. Without dropout there is nothing
// to keep of the state of a generator.

// In the memory that Meta has promised: as a copy of `other` would be.
Tensor laid_out_like(const Tensor& other, const Tensor& tensor) {
  const std::vector<int64_t> strides = record::strides_of_copy(other);
  if (tensor.strides() == c10::IntArrayRef(strides)) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& key,
                                           const Tensor& value, double dropout_p, bool is_causal,
                                           const OptionalTensor& mask,
                                           std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0 && !(mask.has_value() && mask->defined()),
              "[attention] flash attention on a GPU takes no mask and no dropout here");
  const auto made = at::_scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal,
                                                            /*return_debug_mask=*/false, scale);
  return {laid_out_like(query, std::get<0>(made)), std::get<1>(made).contiguous()};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(const Tensor& gradient,
                                                            const Tensor& query, const Tensor& key,
                                                            const Tensor& value, const Tensor& out,
                                                            const Tensor& sums, double,
                                                            bool is_causal, const OptionalTensor&,
                                                            std::optional<double> scale) {
  const Tensor none;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
      gradient, query, key, value, out, sums, none, none, query.size(2), key.size(2), 0.0,
      is_causal, none, none, scale);
  return {laid_out_like(query, of_query), laid_out_like(key, of_key),
          laid_out_like(value, of_value)};
}

// With dropout ATen's kernels draw from torch's CUDA generator, which neither torch.manual_seed nor
// a checkpoint knows of here. Ours are told where to draw (kernels/library/attention.cpp). All of
// it is the memory-efficient operator's for PyTorch, whose backward is given what two of its
// results were: `philox` on the device, and on the CPU seed, offset, and whether it is flash
// attention.

// Whether the device below has the operator; or, without dropout, ATen's.
bool has_kernel(const c10::OperatorHandle& handle) {
  return handle.hasKernelForDispatchKey(runtime::on_host() ? c10::DispatchKey::CPU
                                                           : c10::DispatchKey::CUDA);
}

// ATen's operator: recorded where the device has it, and else run, which says that it has not.
class AtenOperator {
 public:
  explicit AtenOperator(const c10::OperatorHandle& handle)
      : handle_(handle), op_(has_kernel(handle) ? make_op(handle) : nullptr) {}
  void call(torch::jit::Stack* stack) const {
    op_ == nullptr ? run_now(handle_, stack) : record_or_run(*op_, handle_, stack);
  }

 private:
  const c10::OperatorHandle handle_;
  const graph::Op* const op_;
};

Tensor draw_philox(const Tensor& on, base::Stream stream) {
  static const auto draw = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("acc::random_", "")
                               .typed<Tensor&(Tensor&, int64_t, int64_t, int64_t, int64_t)>();
  constexpr int64_t kAll = 0;  // integers of 64 bits
  Tensor numbers = at::empty({2}, on.options().dtype(c10::kLong));
  draw.call(numbers, 0, kAll, static_cast<int64_t>(stream.seed),
            static_cast<int64_t>(stream.offset));
  return at::bitwise_and(numbers, base::kOtherGeneratorBits);
}

// (query, key, value, bias, compute_log_sumexp, dropout_p, is_causal, scale)
void efficient_attention(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 8;
  const auto arguments = torch::jit::last(*stack, kArguments).vec();
  const double dropout_p = arguments[5].toDouble();
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("acc::attention", "");
  static const AtenOperator theirs(handle);
  if (dropout_p == 0 || !has_kernel(op)) return theirs.call(stack);
  const Tensor& query = arguments[0].toTensor();
  const Tensor& key = arguments[1].toTensor();
  const OptionalTensor bias = arguments[3].toOptional<Tensor>();
  const bool is_causal = arguments[6].toBool();
  const bool grouped = query.size(1) != key.size(1);  // the memory-efficient one takes none
  const bool flash =
      !defined(bias) &&
      (grouped || fused_choice(query, key, arguments[2].toTensor(), std::nullopt, dropout_p,
                               is_causal, arguments[7].toOptional<double>(), grouped) == kFlash);
  const auto [seed, offset] = runtime::generator_or_default(std::nullopt, query.device().index())
                                  .reserve(base::philox_increments(query.numel()));
  const Tensor philox = draw_philox(query, {seed, offset});
  const std::array<int64_t, 3> drawn{static_cast<int64_t>(seed), static_cast<int64_t>(offset),
                                     flash};
  torch::jit::Stack call{arguments[0], arguments[1], arguments[2], arguments[3],
                         dropout_p,    is_causal,    arguments[7], flash,
                         philox,       drawn[0],     drawn[1]};
  op.callBoxed(call);
  torch::jit::drop(*stack, kArguments);
  torch::jit::push(*stack, call[0], call[1], philox, at::tensor(drawn, c10::kLong));
}

// (gradient, query, key, value, bias, out, sums, philox_seed, philox_offset, dropout_p,
//  grad_input_mask, is_causal, scale)
void efficient_attention_backward(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 13;
  const auto arguments = torch::jit::last(*stack, kArguments).vec();
  const double dropout_p = arguments[9].toDouble();
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("acc::attention_backward", "");
  static const AtenOperator theirs(handle);
  if (dropout_p == 0 || !has_kernel(op)) return theirs.call(stack);
  const Tensor drawn = arguments[8].toTensor().cpu();  // hooks may have put it on the device
  ACC_CHECK(drawn.scalar_type() == c10::kLong && drawn.numel() == 3,
            "[attention] aten::_scaled_dot_product_efficient_attention_backward was given a "
            "philox_offset of "
            "type ",
            drawn.scalar_type(), " with ", drawn.numel(),
            " elements. Give it the fourth result of the "
            "forward on acc, three integers, without which nothing tells what was dropped.");
  const auto* numbers = drawn.const_data_ptr<int64_t>();
  const bool of_bias = arguments[10].toBoolList().get(3) && arguments[4].toTensor().defined();
  torch::jit::Stack call(arguments.begin(), arguments.begin() + 7);
  torch::jit::push(call, dropout_p, of_bias, arguments[11], arguments[12], numbers[2] != 0,
                   arguments[7], numbers[0], numbers[1]);
  op.callBoxed(call);
  torch::jit::drop(*stack, kArguments);
  torch::jit::push(*stack, call[0], call[1], call[2], call[3]);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_nested_tensor_from_mask_left_aligned", &mask_is_left_aligned);
  m.impl("_scaled_dot_product_efficient_attention",
         torch::CppFunction::makeFromBoxedFunction<&efficient_attention>());
  m.impl("_scaled_dot_product_efficient_attention_backward",
         torch::CppFunction::makeFromBoxedFunction<&efficient_attention_backward>());
}

}  // namespace
}  // namespace acc::aten

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &acc::aten::choose)
}  // namespace at::native
