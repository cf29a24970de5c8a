#include "csrc/aten/sync_batch_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "csrc/runtime/backend.h"

// Formulas: Ioffe and Szegedy, "Batch Normalization" (arXiv 1502.03167), for statistics that are
// put together from those of parts: the mean of means, and the mean of variances and of squared
// distances of means, each weighted by the part's number of elements.
namespace acc::aten {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// All dimensions but that of the channels.
std::vector<int64_t> around_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

// A value per channel, beside `input`.
Tensor beside(const Tensor& per_channel, const Tensor& input) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = per_channel.numel();
  return per_channel.view(sizes);
}

// Half types are added up in float32.
Tensor exact(const Tensor& tensor) {
  return tensor.scalar_type() == c10::kDouble ? tensor : tensor.to(c10::kFloat);
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto [variance, mean] =
      at::var_mean(exact(input), around_channels(input), /*unbiased=*/false, /*keepdim=*/false);
  return {mean, at::rsqrt(variance + eps)};
}

// `means`, `invstds`: a row per part; `counts`: of the elements per channel of each.
std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& means, const Tensor& invstds,
                                        const Maybe& running_mean, const Maybe& running_var,
                                        double momentum, double eps, const Tensor& counts) {
  const Tensor count = counts.to(means.scalar_type()).unsqueeze(1);
  const Tensor all = count.sum(0);
  const Tensor mean = (means * count).sum(0) / all;
  const Tensor variances = at::reciprocal(invstds * invstds) - eps;
  const Tensor away = means - mean;
  const Tensor variance = ((variances + away * away) * count).sum(0) / all;
  if (running_mean.has_value() && running_mean->defined()) {
    running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  }
  if (running_var.has_value() && running_var->defined()) {
    const Tensor unbiased = variance * (all / (all - 1));
    running_var->mul_(1 - momentum).add_(unbiased.to(running_var->scalar_type()), momentum);
  }
  return {mean, at::rsqrt(variance + eps)};
}

Tensor elemt(const Tensor& input, const Maybe& weight, const Maybe& bias, const Tensor& mean,
             const Tensor& invstd, double) {
  Tensor made = (exact(input) - beside(mean, input)) * beside(invstd, input);
  if (weight.has_value() && weight->defined()) made = made * beside(exact(*weight), input);
  if (bias.has_value() && bias->defined()) made = made + beside(exact(*bias), input);
  return made.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& gradient,
                                                           const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd,
                                                           const Maybe& weight, bool input_wanted,
                                                           bool weight_wanted, bool bias_wanted) {
  const auto dims = around_channels(input);
  const Tensor dy = exact(gradient);
  const Tensor sum_dy = dy.sum(dims);
  const Tensor sum_dy_xmu = (dy * (exact(input) - beside(mean, input))).sum(dims);
  const auto type =
      weight.has_value() && weight->defined() ? weight->scalar_type() : input.scalar_type();
  return {input_wanted ? sum_dy : Tensor(), input_wanted ? sum_dy_xmu : Tensor(),
          weight_wanted ? (sum_dy_xmu * invstd).to(type) : Tensor(),
          bias_wanted ? sum_dy.to(type) : Tensor()};
}

Tensor backward_elemt(const Tensor& gradient, const Tensor& input, const Tensor& mean,
                      const Tensor& invstd, const Maybe& weight, const Tensor& sum_dy,
                      const Tensor& sum_dy_xmu, const Tensor& counts) {
  const Tensor all = counts.sum().to(sum_dy.scalar_type());
  const Tensor per_xmu = invstd * invstd * sum_dy_xmu / all;
  Tensor scale = invstd;
  if (weight.has_value() && weight->defined()) scale = scale * exact(*weight);
  const Tensor made = (exact(gradient) - beside(sum_dy / all, input) -
                       (exact(input) - beside(mean, input)) * beside(per_xmu, input)) *
                      beside(scale, input);
  return made.to(input.scalar_type());
}

}  // namespace

void register_sync_batch_norm() {
  runtime::when_chosen([] {
    if (!runtime::on_host()) return;
    // Registers for as long as it lives: for ever.
    static auto* const library = new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library->impl("batch_norm_stats", &stats);
    library->impl("batch_norm_gather_stats_with_counts", &gather_stats);
    library->impl("batch_norm_elemt", &elemt);
    library->impl("batch_norm_backward_reduce", &backward_reduce);
    library->impl("batch_norm_backward_elemt", &backward_elemt);
  });
}

}  // namespace acc::aten
