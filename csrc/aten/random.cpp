#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "csrc/aten/random_check.h"
#include "csrc/base/philox.h"
#include "csrc/runtime/generator.h"
#include "lazy/session/session.h"

// PyTorch's random operators: check the arguments, reserve a piece of the generator's stream, and
// call our own operator with it, which is recorded like any other. All that PyTorch composes from
// these (rand, randn, randint, dropout, ...) needs nothing here.
namespace acc::aten {
namespace {

using at::Tensor;
using MaybeGenerator = std::optional<at::Generator>;

// Seed and offset as the arguments of an operator, which knows signed numbers only.
struct Draw {
  int64_t seed;
  int64_t offset;
};

Draw reserve(const Tensor& on, const MaybeGenerator& generator, int64_t numel) {
  const auto [seed, offset] = runtime::generator_or_default(generator, on.device().index())
                                  .reserve(base::philox_increments(numel));
  return {static_cast<int64_t>(seed), static_cast<int64_t>(offset)};
}

// Calls `acc::<name>` with (arguments..., seed, offset).
template <class Result, class... Arguments>
class OwnOp {
 public:
  explicit OwnOp(const char* name)
      : handle_(c10::Dispatcher::singleton()
                    .findSchemaOrThrow(name, "")
                    .typed<Result(Arguments..., int64_t, int64_t)>()) {}

  Result operator()(Arguments... arguments, const Draw& draw) const {
    return handle_.call(std::forward<Arguments>(arguments)..., draw.seed, draw.offset);
  }

 private:
  c10::TypedOperatorHandle<Result(Arguments..., int64_t, int64_t)> handle_;
};

template <class... Arguments>
class Fill {
 public:
  explicit Fill(const char* name) : op_(name) {}

  Tensor& operator()(Tensor& self, Arguments... arguments, const MaybeGenerator& generator) const {
    at::assert_no_internal_overlap(self);
    if (self.numel() == 0) return self;
    op_(self, std::forward<Arguments>(arguments)..., reserve(self, generator, self.numel()));
    return self;
  }

 private:
  OwnOp<Tensor&, Tensor&, Arguments...> op_;
};

Tensor contiguous_like(const Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

// --- filling ------------------------------------------------------------------------------------

Tensor& uniform(Tensor& self, double from, double to, MaybeGenerator generator) {
  static const Fill<double, double> fill("acc::uniform_");
  check_uniform(self.scalar_type(), from, to);
  return fill(self, from, to, generator);
}

Tensor& normal(Tensor& self, double mean, double std, MaybeGenerator generator) {
  static const Fill<double, double> fill("acc::normal_");
  check_normal(self.scalar_type(), std);
  return fill(self, mean, std, generator);
}

Tensor& log_normal(Tensor& self, double mean, double std, MaybeGenerator generator) {
  static const Fill<double, double> fill("acc::log_normal_");
  check_log_normal(self.scalar_type(), std);
  return fill(self, mean, std, generator);
}

Tensor& cauchy(Tensor& self, double median, double sigma, MaybeGenerator generator) {
  static const Fill<double, double> fill("acc::cauchy_");
  check_cauchy(self.scalar_type(), median, sigma);
  return fill(self, median, sigma, generator);
}

Tensor& exponential(Tensor& self, double lambd, MaybeGenerator generator) {
  static const Fill<double> fill("acc::exponential_");
  check_exponential(self.scalar_type(), lambd);
  return fill(self, lambd, generator);
}

Tensor& geometric(Tensor& self, double p, MaybeGenerator generator) {
  static const Fill<double> fill("acc::geometric_");
  check_geometric(self.scalar_type(), p);
  return fill(self, p, generator);
}

Tensor& random_in(Tensor& self, IntegerRange range, const MaybeGenerator& generator) {
  static const Fill<int64_t, int64_t> fill("acc::random_");
  const uint64_t most = static_cast<uint64_t>(range.last) - static_cast<uint64_t>(range.from);
  const auto count = static_cast<int64_t>(most + 1);
  return fill(self, count == 0 ? 0 : range.from, count, generator);  // all integers: as drawn
}

Tensor& random(Tensor& self, MaybeGenerator generator) {
  return random_in(self, check_random(self.scalar_type()), generator);
}

Tensor& random_to(Tensor& self, int64_t to, MaybeGenerator generator) {
  return random_in(self, check_random(self.scalar_type(), 0, to), generator);
}

Tensor& random_from(Tensor& self, int64_t from, std::optional<int64_t> to,
                    MaybeGenerator generator) {
  return random_in(self, check_random(self.scalar_type(), from, to), generator);
}

Tensor& bernoulli(Tensor& self, double p, MaybeGenerator generator) {
  static const Fill<int64_t> fill("acc::bernoulli_");
  check_bernoulli(self.scalar_type(), p);
  return fill(self, static_cast<int64_t>(base::words_below(p)), generator);
}

Tensor& bernoulli_tensor(Tensor& self, const Tensor& p, MaybeGenerator generator) {
  static const Fill<const Tensor&> fill("acc::bernoulli_tensor_");
  check_bernoulli_tensor(self.scalar_type(), p.scalar_type());
  // Probabilities may be on the CPU, as for CUDA tensors.
  const Tensor given = p.to(self.device()).expand(self.sizes());
  at::assert_no_partial_overlap(self, given);
  return fill(self, given, generator);
}

Tensor& bernoulli_out(const Tensor& self, MaybeGenerator generator, Tensor& out) {
  at::native::resize_output(out, self.sizes());
  return bernoulli_tensor(out, self, std::move(generator));
}

// The same permutation as acc::randperm_'s, which draws on the host: the order of one wide number
// per position, where equal ones stay in order. Kernels draw them, and ATen sorts them on the GPU.
Tensor& permute_on_gpu(Tensor& out, const MaybeGenerator& generator) {
  static const OwnOp<Tensor&, Tensor&, int64_t, int64_t> draw("acc::random_");
  constexpr int64_t kAll = 0;  // integers of 64 bits
  at::assert_no_internal_overlap(out);
  Tensor numbers = at::empty(out.sizes(), out.options().dtype(c10::kLong));
  // From the least one on, so that they are sorted as numbers without a sign.
  draw(numbers, std::numeric_limits<int64_t>::min(), kAll, reserve(out, generator, out.numel()));
  return out.copy_(std::get<1>(at::sort(numbers, /*stable=*/true, /*dim=*/0,
                                        /*descending=*/false)));
}

Tensor& randperm_out(int64_t n, MaybeGenerator generator, Tensor& out) {
  static const Fill<> fill("acc::randperm_");
  check_randperm(out.scalar_type(), n);
  at::native::resize_output(out, {n});
  if (n > 0 && session::for_gpus()) return permute_on_gpu(out, generator);
  return fill(out, generator);
}

// --- normal numbers with a mean or a deviation for each element ---------------------------------

Tensor& normal_mean_out(const Tensor& mean, double std, MaybeGenerator generator, Tensor& out) {
  check_normal(out.scalar_type(), std);
  at::native::resize_output(out, mean.sizes());
  return normal(out, 0.0, std, std::move(generator)).add_(mean);
}

Tensor& normal_with(Tensor& out, const Tensor& std, const MaybeGenerator& generator) {
  static const Fill<const Tensor&> fill("acc::normal_std_");
  check_normal(out.scalar_type(), 1.0);
  return fill(out, std, generator);
}

Tensor& normal_std_out(double mean, const Tensor& std, MaybeGenerator generator, Tensor& out) {
  check_normal_std(std.scalar_type());
  at::native::resize_output(out, std.sizes());
  return normal_with(out, std, generator).add_(mean);
}

Tensor& normal_both_out(const Tensor& mean, const Tensor& std, MaybeGenerator generator,
                        Tensor& out) {
  check_normal_std(std.scalar_type());
  at::native::resize_output(out, at::infer_size(mean.sizes(), std.sizes()));
  return normal_with(out, std.expand(out.sizes()), generator).add_(mean);
}

Tensor normal_mean(const Tensor& mean, double std, MaybeGenerator generator) {
  check_normal(mean.scalar_type(), std);
  Tensor out = contiguous_like(mean);
  return normal_mean_out(mean, std, std::move(generator), out);
}

Tensor normal_std(double mean, const Tensor& std, MaybeGenerator generator) {
  check_normal_std(std.scalar_type());
  Tensor out = contiguous_like(std);
  return normal_std_out(mean, std, std::move(generator), out);
}

Tensor normal_both(const Tensor& mean, const Tensor& std, MaybeGenerator generator) {
  check_normal_std(std.scalar_type());
  Tensor out = at::empty(at::infer_size(mean.sizes(), std.sizes()), mean.options());
  return normal_both_out(mean, std, std::move(generator), out);
}

// --- dropout and rrelu --------------------------------------------------------------------------

std::tuple<Tensor, Tensor> dropout_in_training(const Tensor& input, double p,
                                               const MaybeGenerator& generator) {
  static const OwnOp<std::tuple<Tensor, Tensor>, const Tensor&, int64_t, double> op(
      "acc::native_dropout");
  check_dropout(input.scalar_type(), p);
  const double scale = p == 1.0 ? 0.0 : 1.0 / (1.0 - p);
  if (input.is_complex()) {
    Tensor mask = at::empty_like(input, input.options().dtype(c10::kBool));
    bernoulli(mask, 1.0 - p, generator);
    Tensor output = input.mul(mask).mul_(scale);
    return {std::move(output), std::move(mask)};
  }
  return op(input, static_cast<int64_t>(base::words_below(1.0 - p)), scale,
            reserve(input, generator, input.numel()));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input)};
  if (train.value_or(true)) return dropout_in_training(input, p, std::nullopt);
  return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
}

// CUDA's older form: `p` is the probability to keep, the mask a byte.
std::tuple<Tensor, Tensor> fused_dropout(const Tensor& input, double p, MaybeGenerator generator) {
  auto [output, mask] = dropout_in_training(input, 1.0 - p, generator);
  return {std::move(output), mask.to(c10::kByte)};
}

// Negative inputs are multiplied by uniform numbers, which the noise keeps for the backward pass;
// it is 1 where the input passes.
Tensor rrelu(const Tensor& self, Tensor& noise, const at::Scalar& lower, const at::Scalar& upper,
             bool training, MaybeGenerator generator) {
  if (!training) {
    return at::leaky_relu(self, (lower.to<double>() + upper.to<double>()) / 2);
  }
  TORCH_CHECK(self.sizes() == noise.sizes(),
              "noise tensor shape must match self tensor shape. Got self.shape = ", self.sizes(),
              " noise.shape = ", noise.sizes());
  check_rrelu(self.scalar_type(), lower.to<double>(), upper.to<double>());
  uniform(noise, lower.to<double>(), upper.to<double>(), std::move(generator));
  noise.masked_fill_(self.le(0).logical_not_(), 1);
  return self.mul(noise);
}

Tensor& rrelu_(Tensor& self, Tensor& noise, const at::Scalar& lower, const at::Scalar& upper,
               bool training, MaybeGenerator generator) {
  return self.copy_(rrelu(self, noise, lower, upper, training, std::move(generator)));
}

Tensor& rrelu_out(const Tensor& self, Tensor& noise, const at::Scalar& lower,
                  const at::Scalar& upper, bool training, MaybeGenerator generator, Tensor& out) {
  const Tensor result = rrelu(self, noise, lower, upper, training, std::move(generator));
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

// --- sampling -----------------------------------------------------------------------------------

Tensor sample_multinomial(const Tensor& self, int64_t num_samples, bool replacement,
                          MaybeGenerator generator) {
  static const OwnOp<Tensor, const Tensor&, int64_t, bool> op("acc::multinomial");
  check_multinomial(self, num_samples, replacement);
  if (self.numel() == 0) {
    return at::empty({self.size(0), num_samples}, self.options().dtype(c10::kLong));
  }
  return op(self, num_samples, replacement, reserve(self, generator, self.numel()));
}

Tensor& multinomial_out(const Tensor& self, int64_t num_samples, bool replacement,
                        MaybeGenerator generator, Tensor& out) {
  TORCH_CHECK(out.device() == self.device(),
              "multinomial arguments must have the same device, but out is on ", out.device(),
              " and self on ", self.device());
  TORCH_CHECK(out.scalar_type() == c10::kLong,
              "multinomial expects Long tensor out, got: ", out.scalar_type());
  const Tensor result = sample_multinomial(self, num_samples, replacement, std::move(generator));
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

Tensor poisson(const Tensor& self, MaybeGenerator generator) {
  static const OwnOp<Tensor, const Tensor&> op("acc::poisson");
  check_poisson(self.scalar_type());
  return op(self, reserve(self, generator, self.numel()));
}

Tensor binomial(const Tensor& count, const Tensor& prob, MaybeGenerator generator) {
  static const OwnOp<Tensor, const Tensor&, const Tensor&> op("acc::binomial");
  check_binomial(count.scalar_type(), prob.scalar_type());
  return op(count, prob, reserve(count, generator, 1));
}

Tensor standard_gamma(const Tensor& self, MaybeGenerator generator) {
  static const OwnOp<Tensor, const Tensor&> op("acc::standard_gamma");
  check_standard_gamma(self.scalar_type());
  return op(self, reserve(self, generator, self.numel()));
}

Tensor sample_dirichlet(const Tensor& self, MaybeGenerator generator) {
  static const OwnOp<Tensor, const Tensor&> op("acc::sample_dirichlet");
  check_sample_dirichlet(self.scalar_type());
  return op(self, reserve(self, generator, self.numel()));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("uniform_", &uniform);
  m.impl("normal_", &normal);
  m.impl("log_normal_", &log_normal);
  m.impl("cauchy_", &cauchy);
  m.impl("exponential_", &exponential);
  m.impl("geometric_", &geometric);
  m.impl("random_", &random);
  m.impl("random_.to", &random_to);
  m.impl("random_.from", &random_from);
  m.impl("bernoulli_.float", &bernoulli);
  m.impl("bernoulli_.Tensor", &bernoulli_tensor);
  m.impl("bernoulli.out", &bernoulli_out);
  m.impl("randperm.generator_out", &randperm_out);
  m.impl("normal.Tensor_float_out", &normal_mean_out);
  m.impl("normal.float_Tensor_out", &normal_std_out);
  m.impl("normal.Tensor_Tensor_out", &normal_both_out);
  m.impl("normal.Tensor_float", &normal_mean);
  m.impl("normal.float_Tensor", &normal_std);
  m.impl("normal.Tensor_Tensor", &normal_both);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_dropout", &fused_dropout);
  m.impl("rrelu_with_noise", &rrelu);
  m.impl("rrelu_with_noise_", &rrelu_);
  m.impl("rrelu_with_noise.out", &rrelu_out);
  m.impl("multinomial", &sample_multinomial);
  m.impl("multinomial.out", &multinomial_out);
  m.impl("poisson", &poisson);
  m.impl("binomial", &binomial);
  m.impl("_standard_gamma", &standard_gamma);
  m.impl("_sample_dirichlet", &sample_dirichlet);
}

}  // namespace
}  // namespace acc::aten
