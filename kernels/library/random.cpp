#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "csrc/base/check.h"

// The random operators of the library `acc`: schemas, Meta kernels, and the CUDA kernels that are
// the CPU's. `seed` and `offset` are the bits of unsigned numbers: the stream to draw from,
// reserved from a generator when the call was recorded. Arguments were checked then too; only what
// depends on the data of tensors is checked by the kernels.
namespace acc::library {
namespace {

using at::Tensor;

TORCH_LIBRARY_FRAGMENT(acc, m) {
  const std::vector<at::Tag> random = {at::Tag::nondeterministic_seeded};
  const auto def = [&](const char* schema) { m.def(schema, random); };
  def("uniform_(Tensor(a!) self, float from, float to, int seed, int offset) -> Tensor(a!)");
  def("normal_(Tensor(a!) self, float mean, float std, int seed, int offset) -> Tensor(a!)");
  def("log_normal_(Tensor(a!) self, float mean, float std, int seed, int offset) -> Tensor(a!)");
  def("exponential_(Tensor(a!) self, float lambd, int seed, int offset) -> Tensor(a!)");
  def("cauchy_(Tensor(a!) self, float median, float sigma, int seed, int offset) -> Tensor(a!)");
  def("geometric_(Tensor(a!) self, float p, int seed, int offset) -> Tensor(a!)");
  // 1 where the word is below a number.
  def("bernoulli_(Tensor(a!) self, int below, int seed, int offset) -> Tensor(a!)");
  // `p`, `std`: anything that expands to self's shape.
  def("bernoulli_tensor_(Tensor(a!) self, Tensor p, int seed, int offset) -> Tensor(a!)");
  def("normal_std_(Tensor(a!) self, Tensor std, int seed, int offset) -> Tensor(a!)");
  // So many integers from `from` on; 0 stands for 2^64.
  def("random_(Tensor(a!) self, int from, int count, int seed, int offset) -> Tensor(a!)");
  // A permutation of 0 .. numel - 1.
  def("randperm_(Tensor(a!) self, int seed, int offset) -> Tensor(a!)");
  def("multinomial(Tensor probs, int num_samples, bool replacement, int seed, int offset)"
      " -> Tensor");
  // Output and mask of dropout in training: elements whose word is below a number are kept, and
  // multiplied by the scale.
  def("native_dropout(Tensor input, int below, float scale, int seed, int offset)"
      " -> (Tensor, Tensor)");
  def("poisson(Tensor self, int seed, int offset) -> Tensor");
  def("binomial(Tensor count, Tensor prob, int seed, int offset) -> Tensor");
  def("standard_gamma(Tensor self, int seed, int offset) -> Tensor");
  def("sample_dirichlet(Tensor self, int seed, int offset) -> Tensor");
}

constexpr const char* kInPlace[] = {"uniform_",    "normal_",    "log_normal_", "exponential_",
                                    "cauchy_",     "geometric_", "bernoulli_",  "bernoulli_tensor_",
                                    "normal_std_", "random_",    "randperm_"};
constexpr const char* kFunctional[] = {"multinomial", "native_dropout", "poisson",
                                       "binomial",    "standard_gamma", "sample_dirichlet"};

void return_self(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size() - 1);
}

Tensor multinomial_meta(const Tensor& probs, int64_t num_samples, bool, int64_t, int64_t) {
  const auto options = probs.options().dtype(c10::kLong);
  return probs.dim() == 1 ? at::empty({num_samples}, options)
                          : at::empty({probs.size(0), num_samples}, options);
}

std::tuple<Tensor, Tensor> native_dropout_meta(const Tensor& input, int64_t, double, int64_t,
                                               int64_t) {
  // What at::empty_like gives; on Meta that is Python's.
  const auto strides = input.is_non_overlapping_and_dense()
                           ? input.strides().vec()
                           : at::infer_dense_strides(input.sizes(), input.strides());
  return {at::detail::empty_strided_meta(input.sizes(), strides, input.scalar_type()),
          at::detail::empty_strided_meta(input.sizes(), strides, c10::kBool)};
}

Tensor contiguous_meta(const Tensor& self, int64_t, int64_t) {
  return at::empty(self.sizes(), self.options());
}

Tensor binomial_meta(const Tensor& count, const Tensor& prob, int64_t, int64_t) {
  return at::empty(at::infer_size(count.sizes(), prob.sizes()), count.options());
}

TORCH_LIBRARY_IMPL(acc, Meta, m) {
  for (const char* name : kInPlace) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&return_self>());
  }
  m.impl("multinomial", &multinomial_meta);
  m.impl("native_dropout", &native_dropout_meta);
  m.impl("poisson", &contiguous_meta);
  m.impl("binomial", &binomial_meta);
  m.impl("standard_gamma", &contiguous_meta);
  m.impl("sample_dirichlet", &contiguous_meta);
}

// Draws on the host and copies, so that a seed gives the same numbers on both. Each of these
// operators writes all of an argument that it writes, so that one is not copied to the host.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t n = schema.arguments().size();
  const size_t base = stack->size() - n;
  torch::jit::Stack call;
  Tensor written;
  c10::Device device(c10::kCPU);
  for (size_t i = 0; i < n; ++i) {
    const c10::IValue& value = (*stack)[base + i];
    if (!value.isTensor()) {
      call.push_back(value);
      continue;
    }
    const Tensor& tensor = value.toTensor();
    device = tensor.device();
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      ACC_CHECK(!written.defined());
      written = tensor;
      call.emplace_back(at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)));
    } else {
      call.emplace_back(tensor.to(c10::kCPU));
    }
  }
  op.callBoxed(call);
  torch::jit::drop(*stack, n);
  for (const c10::IValue& value : call) {
    if (written.defined()) {
      written.copy_(value.toTensor());
      stack->emplace_back(written);
    } else {
      stack->emplace_back(value.toTensor().to(device));
    }
  }
}

TORCH_LIBRARY_IMPL(acc, CUDA, m) {
  for (const auto& names :
       {std::vector<const char*>(std::begin(kInPlace), std::end(kInPlace)),
        std::vector<const char*>(std::begin(kFunctional), std::end(kFunctional))}) {
    for (const char* name : names) {
      m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
  }
}

}  // namespace
}  // namespace acc::library
