#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "csrc/base/signals.h"

// acc::linear, the product that stands in for mm and addmm where it is faster than they are. Where
// it has no kernel it is not.
namespace acc::library {
namespace {

using at::Tensor;

// Inductor calls this operator for linear layers too.
std::optional<c10::OperatorHandle> onednn() {
  const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  const bool usable = found.has_value() && found->hasKernelForDispatchKey(c10::DispatchKey::CPU);
  return usable ? found : std::nullopt;
}

// ATen multiplies float32 matrices with MKL, which on AMD's processors is behind oneDNN
// (docs/performance.md). Others were not measured.
bool onednn_is_faster() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return at::hasMKL() && __builtin_cpu_is("amd") != 0 && __builtin_cpu_supports("avx512f") != 0;
#else
  return false;
#endif
}

// With less than full precision ATen asks oneDNN by itself.
bool onednn_is_wanted() {
  const at::Context& context = at::globalContext();
  const auto precision =
      context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return context.userEnabledMkldnn() &&
         (precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE);
}

// While this lives, neither this thread nor those that help it take signals; the helpers, which are
// libgomp's, never do again. oneDNN's float32 gemm keeps the address of its workspace in the stack
// pointer, so the frame of a signal's handler would overwrite the heap around it: before 3.11.2
// (uxlfoundation/oneDNN issue 4845), and PyTorch 2.11 has 3.10.2.
class WithoutSignals {
 public:
  WithoutSignals() {
#pragma omp parallel
    base::block_signals();
  }

 private:
  base::SignalsBlocked blocked_;
};

// (R, k), (n, k), (n) -> (R, n), all float32.
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!onednn_is_wanted()) {
    return bias.has_value() ? at::addmm(*bias, input, weight.t()) : at::mm(input, weight.t());
  }
  static const c10::OperatorHandle op = onednn().value();
  torch::jit::Stack stack;
  // no function behind the product, none of its numbers, none of its variants
  torch::jit::push(stack, input, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
  const WithoutSignals none;
  op.callBoxed(&stack);
  return std::move(stack[0]).toTensor();
}

TORCH_LIBRARY_FRAGMENT(acc, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(acc, CPU, m) {
  if (onednn_is_faster() && onednn().has_value()) m.impl("linear", &linear);
}

}  // namespace
}  // namespace acc::library
