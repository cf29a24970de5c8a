#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

// Whether the arguments of a random operator make sense, asked when the call is recorded, so that
// the error is raised at the line that made it. Ordinary arguments pass by a few comparisons; for
// all others PyTorch's own CPU operator is called with one element and a generator of its own, and
// what it throws, or warns, is what the user sees.
//
// Not checked here, because it would wait for the device: the contents of tensors (probabilities,
// weights, deviations, rates). The kernels do, so those errors appear when the step runs.
namespace acc::aten {

void check_uniform(c10::ScalarType dtype, double from, double to);
void check_normal(c10::ScalarType dtype, double std);
void check_log_normal(c10::ScalarType dtype, double std);
void check_exponential(c10::ScalarType dtype, double lambd);
void check_cauchy(c10::ScalarType dtype, double median, double sigma);
void check_geometric(c10::ScalarType dtype, double p);
void check_bernoulli(c10::ScalarType dtype, double p);
// Probabilities of type `p` for results of type `dtype`.
void check_bernoulli_tensor(c10::ScalarType dtype, c10::ScalarType p);
void check_normal_std(c10::ScalarType std);
void check_dropout(c10::ScalarType dtype, double p);
void check_randperm(c10::ScalarType dtype, int64_t n);
void check_multinomial(const at::Tensor& weights, int64_t num_samples, bool replacement);
// The dtypes that a sampler takes.
void check_poisson(c10::ScalarType dtype);
void check_binomial(c10::ScalarType count, c10::ScalarType prob);
void check_standard_gamma(c10::ScalarType dtype);
void check_sample_dirichlet(c10::ScalarType dtype);
void check_rrelu(c10::ScalarType dtype, double lower, double upper);

// Both ends included, and both representable in the dtype.
struct IntegerRange {
  int64_t from;
  int64_t last;
};
// random_(): 0 to the largest number; for floats to 2^(bits of the significand).
IntegerRange check_random(c10::ScalarType dtype);
// random_(from, to): `to` excluded; none: up to the largest number.
IntegerRange check_random(c10::ScalarType dtype, int64_t from, std::optional<int64_t> to);

}  // namespace acc::aten
