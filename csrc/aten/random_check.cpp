#include "csrc/aten/random_check.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_sample_dirichlet.h>
#include <ATen/ops/_standard_gamma.h>
#include <ATen/ops/binomial.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/poisson.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/rrelu_with_noise.h>

#include <bit>
#include <limits>

namespace acc::aten {
namespace {

using at::Tensor;
using c10::ScalarType;

Tensor zeros(c10::IntArrayRef sizes, ScalarType dtype) {
  Tensor tensor = at::detail::empty_cpu(sizes, dtype);
  return tensor.zero_();
}
Tensor one(ScalarType dtype) { return zeros({1}, dtype); }
at::Generator generator() { return at::detail::createCPUGenerator(0); }

bool is_float(ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kHalf ||
         dtype == c10::kBFloat16;
}
bool is_single_or_double(ScalarType dtype) { return dtype == c10::kFloat || dtype == c10::kDouble; }
bool is_complex(ScalarType dtype) {
  return dtype == c10::kComplexFloat || dtype == c10::kComplexDouble;
}
bool is_integer(ScalarType dtype) {
  return dtype == c10::kLong || dtype == c10::kInt || dtype == c10::kShort || dtype == c10::kChar ||
         dtype == c10::kByte;
}

double largest(ScalarType dtype) {
  switch (dtype) {
    case c10::kHalf:
      return 65504.0;
    case c10::kBFloat16:
      return 0x1.FEp127;
    case c10::kDouble:
    case c10::kComplexDouble:
      return std::numeric_limits<double>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

int significand_bits(ScalarType dtype) {
  switch (dtype) {
    case c10::kHalf:
      return 11;
    case c10::kBFloat16:
      return 8;
    case c10::kDouble:
      return 53;
    default:
      return 24;
  }
}

// The integers of the dtype that int64 holds.
IntegerRange integers(ScalarType dtype) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  switch (dtype) {
    case c10::kBool:
      return {0, 1};
    case c10::kByte:
      return {0, 0xFF};
    case c10::kChar:
      return {-0x80, 0x7F};
    case c10::kShort:
      return {-0x8000, 0x7FFF};
    case c10::kInt:
      return {-0x80000000LL, 0x7FFFFFFF};
    case ScalarType::UInt16:
      return {0, 0xFFFF};
    case ScalarType::UInt32:
      return {0, 0xFFFFFFFFLL};
    case ScalarType::UInt64:
      return {0, kMax};
    default:
      return {std::numeric_limits<int64_t>::min(), kMax};
  }
}

// The nearest number that the float dtype holds, not below (`up`) or not above `value`.
int64_t representable(ScalarType dtype, int64_t value, bool up) {
  const uint64_t magnitude =
      value < 0 ? -static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  const int excess = std::bit_width(magnitude) - significand_bits(dtype);
  if (excess <= 0) return value;
  const __int128 spacing = static_cast<__int128>(1) << excess;
  __int128 rounded = value / spacing * spacing;
  if (up && rounded < value) rounded += spacing;
  if (!up && rounded > value) rounded -= spacing;
  constexpr IntegerRange kLong = {std::numeric_limits<int64_t>::min(),
                                  std::numeric_limits<int64_t>::max()};
  if (rounded < kLong.from) return kLong.from;
  return rounded > kLong.last ? kLong.last : static_cast<int64_t>(rounded);
}

}  // namespace

void check_uniform(ScalarType dtype, double from, double to) {
  const double most = largest(dtype);
  const bool ordinary = (is_float(dtype) || is_complex(dtype)) && from >= -most && to <= most &&
                        from <= to && to - from <= most;
  if (!ordinary) one(dtype).uniform_(from, to, generator());
}

void check_normal(ScalarType dtype, double std) {
  if ((is_float(dtype) || is_complex(dtype)) && std >= 0) return;
  one(dtype).normal_(0, std, generator());
}

void check_log_normal(ScalarType dtype, double std) {
  if (!is_float(dtype) || !(std > 0)) one(dtype).log_normal_(0, std, generator());
}

void check_exponential(ScalarType dtype, double lambd) {
  if (!is_float(dtype) || !(lambd > 0)) one(dtype).exponential_(lambd, generator());
}

void check_cauchy(ScalarType dtype, double median, double sigma) {
  if (!is_float(dtype) || !(sigma > 0)) one(dtype).cauchy_(median, sigma, generator());
}

void check_geometric(ScalarType dtype, double p) {
  const bool ordinary = (is_float(dtype) || is_integer(dtype)) && p > 0 && p < 1;
  if (!ordinary) one(dtype).geometric_(p, generator());
}

void check_bernoulli(ScalarType dtype, double p) {
  const bool ordinary =
      (is_float(dtype) || is_integer(dtype) || dtype == c10::kBool) && p >= 0 && p <= 1;
  if (!ordinary) one(dtype).bernoulli_(p, generator());
}

void check_bernoulli_tensor(ScalarType dtype, ScalarType p) {
  const bool ordinary =
      (is_float(dtype) || is_integer(dtype) || dtype == c10::kBool) && is_float(p);
  if (!ordinary) one(dtype).bernoulli_(one(p), generator());
}

void check_normal_std(ScalarType std) {
  if (!is_float(std)) at::normal(0.0, one(std), generator());
}

void check_dropout(ScalarType dtype, double p) {
  const bool ordinary = (is_float(dtype) || is_complex(dtype)) && p >= 0 && p <= 1;
  if (!ordinary) at::native_dropout(one(dtype), p, true);
}

void check_randperm(ScalarType dtype, int64_t n) {
  int64_t most = -1;
  if (is_integer(dtype)) most = integers(dtype).last;
  if (is_float(dtype)) most = (int64_t{1} << significand_bits(dtype)) + 1;
  if (n >= 0 && n <= most) return;
  Tensor out = at::detail::empty_cpu({0}, dtype);
  at::randperm_out(out, n, generator());
}

void check_multinomial(const Tensor& weights, int64_t num_samples, bool replacement) {
  // More categories than floats count one by one are refused by PyTorch.
  constexpr int64_t kMostCategories = int64_t{1} << 24;
  const bool ordinary = is_float(weights.scalar_type()) &&
                        (weights.dim() == 1 || weights.dim() == 2) && num_samples > 0 &&
                        weights.size(-1) > 0 && weights.size(-1) <= kMostCategories &&
                        (replacement || num_samples <= weights.size(-1));
  if (ordinary) return;
  const Tensor like = zeros(weights.sizes(), weights.scalar_type());
  at::multinomial(like, num_samples, replacement, generator());
}

void check_rrelu(ScalarType dtype, double lower, double upper) {
  if (is_float(dtype) && lower <= upper) return;
  Tensor noise = one(dtype);
  at::rrelu_with_noise(one(dtype), noise, lower, upper, true, generator());
}

void check_poisson(ScalarType dtype) {
  if (!is_float(dtype)) at::poisson(one(dtype), generator());
}

void check_binomial(ScalarType count, ScalarType prob) {
  if (!is_single_or_double(count) || count != prob)
    at::binomial(one(count), one(prob), generator());
}

void check_standard_gamma(ScalarType dtype) {
  if (!is_single_or_double(dtype)) at::_standard_gamma(one(dtype), generator());
}

void check_sample_dirichlet(ScalarType dtype) {
  if (!is_single_or_double(dtype)) at::_sample_dirichlet(one(dtype), generator());
}

IntegerRange check_random(ScalarType dtype) {
  if (is_float(dtype)) return {0, int64_t{1} << significand_bits(dtype)};
  if (!is_integer(dtype) && dtype != c10::kBool) one(dtype).random_(generator());
  return {0, integers(dtype).last};
}

IntegerRange check_random(ScalarType dtype, int64_t from, std::optional<int64_t> to) {
  const bool floats = is_float(dtype);
  const int64_t exact = floats ? int64_t{1} << significand_bits(dtype) : 0;
  const IntegerRange all = floats ? IntegerRange{-exact, exact} : integers(dtype);
  // The whole of int64, where PyTorch knows it.
  const bool whole = !to.has_value() && from == std::numeric_limits<int64_t>::min();
  const bool ordinary = (floats || is_integer(dtype) || dtype == c10::kBool) && !whole &&
                        from >= all.from && from <= all.last &&
                        (to.has_value() ? from < *to && *to - 1 <= all.last : from < all.last);
  if (!ordinary) one(dtype).random_(from, to, generator());
  if (whole) return {from, std::numeric_limits<int64_t>::max()};
  IntegerRange range = {from, to.has_value() ? *to - 1 : all.last};
  if (floats) {
    range.from = representable(dtype, range.from, true);
    range.last = representable(dtype, range.last, false);
  }
  // Nothing between the ends is representable: the nearest number is all there is.
  if (range.last < range.from) range.last = range.from;
  return range;
}

}  // namespace acc::aten
