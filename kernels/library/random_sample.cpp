#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_sample_dirichlet_ops.h>
#include <ATen/ops/_standard_gamma_ops.h>
#include <ATen/ops/binomial_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/multinomial_ops.h>
#include <ATen/ops/poisson_ops.h>
#include <torch/library.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/library/random.h"

// CPU kernels of the random operators that are more than a formula per element.
namespace acc::library {
namespace {

using at::Tensor;

Tensor like(const Tensor& tensor, c10::ScalarType dtype) {
  return at::_ops::empty_like::call(tensor, dtype, std::nullopt, std::nullopt, std::nullopt,
                                    std::nullopt);
}

template <class T>
void dropout(const Tensor& input, const Tensor& output, const Tensor& mask, int64_t below,
             double factor, Stream stream) {
  const Elements source(input);
  const Elements target(output);
  const Elements kept(mask);
  const auto limit = static_cast<uint64_t>(below);
  const T scale = static_cast<T>(factor);
  for_chunks<1>(input.numel(), stream, [&](const uint32_t* words, int64_t begin, int64_t n) {
    T values[kRandomChunk];
    load(input, source, begin, begin + n, values);
    float flags[kRandomChunk];
    flag_floats(words, word_groups(n), limit, flags);
    // A product, as in PyTorch: infinity and NaN stay visible where they are dropped.
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] * static_cast<T>(flags[i]) * scale;
    store(output, target, begin, begin + n, values);
    store(mask, kept, begin, begin + n, flags);
  });
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, int64_t below, double scale,
                                          int64_t seed, int64_t offset) {
  Tensor output = like(input, input.scalar_type());
  Tensor mask = like(input, c10::kBool);
  const Stream stream = stream_of(seed, offset);
  if (input.scalar_type() == c10::kDouble) {
    dropout<double>(input, output, mask, below, scale, stream);
  } else {
    dropout<float>(input, output, mask, below, scale, stream);
  }
  return {std::move(output), std::move(mask)};
}

// A permutation is the order of one wide number per position; equal ones stay in order.
struct Key {
  uint64_t number;
  int64_t position;
  bool operator<(const Key& other) const {
    return number != other.number ? number < other.number : position < other.position;
  }
};

std::vector<Key> permutation(int64_t n, Stream stream) {
  std::vector<Key> keys(static_cast<size_t>(n));
  for_chunks<2>(n, stream, [&](const uint32_t* words, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      keys[static_cast<size_t>(begin + i)] = {wide(words + 2 * i), begin + i};
    }
  });
  constexpr int64_t kSmall = 4096;
  if (n <= kSmall) {
    std::sort(keys.begin(), keys.end());
    return keys;
  }
  // The numbers are uniform, so their upper bits spread them over buckets of four to eight.
  const int shift = std::countl_zero(static_cast<uint64_t>(n / 4)) + 1;
  const size_t buckets = size_t{1} << (64 - shift);
  std::vector<size_t> ends(buckets + 1);
  for (const Key& key : keys) ++ends[(key.number >> shift) + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<Key> sorted(keys.size());
  std::vector<size_t> next(ends.begin(), ends.end() - 1);
  for (const Key& key : keys) sorted[next[key.number >> shift]++] = key;
  at::parallel_for(0, static_cast<int64_t>(buckets), 4096, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      const auto bucket = static_cast<size_t>(b);
      std::sort(sorted.begin() + static_cast<std::ptrdiff_t>(ends[bucket]),
                sorted.begin() + static_cast<std::ptrdiff_t>(ends[bucket + 1]));
    }
  });
  return sorted;
}

Tensor& randperm(Tensor& self, int64_t seed, int64_t offset) {
  const int64_t n = self.numel();
  const std::vector<Key> keys = permutation(n, stream_of(seed, offset));
  const Elements elements(self);
  int64_t values[kRandomChunk];
  for (int64_t begin = 0; begin < n; begin += kRandomChunk) {
    const int64_t end = std::min(n, begin + kRandomChunk);
    for (int64_t i = begin; i < end; ++i) {
      values[i - begin] = keys[static_cast<size_t>(i)].position;
    }
    store(self, elements, begin, end, values);
  }
  return self;
}

// One row of weights and what is drawn from it; element numbers of the draws start at `first`.
class Row {
 public:
  Row(std::vector<double> weights, Stream stream, int64_t first)
      : weights_(std::move(weights)), stream_(stream), first_(static_cast<uint64_t>(first)) {}

  // Each of the `n` draws looks its number up in the running sum.
  void with_replacement(int64_t n, int64_t* out) {
    std::partial_sum(weights_.begin(), weights_.end(), weights_.begin());
    const double total = weights_.back();
    // Rounding may carry the largest number to the total: it belongs to the last positive weight.
    const auto last = std::lower_bound(weights_.begin(), weights_.end(), total);
    for (int64_t i = 0; i < n; ++i) {
      const auto found = std::upper_bound(weights_.begin(), last, unit_double(number(i)) * total);
      out[i] = found - weights_.begin();
    }
  }

  // The smallest of exponential numbers of these rates, one after the other (Efraimidis and
  // Spirakis 2006). Categories of weight zero come last, in order.
  void without_replacement(int64_t n, int64_t* out) {
    std::vector<std::pair<double, int64_t>> keys(weights_.size());
    for (size_t j = 0; j < keys.size(); ++j) {
      const auto index = static_cast<int64_t>(j);
      const double time = weights_[j] > 0 ? -std::log(open_double(number(index))) / weights_[j]
                                          : std::numeric_limits<double>::infinity();
      keys[j] = {time, index};
    }
    std::partial_sort(keys.begin(), keys.begin() + n, keys.end());
    for (int64_t i = 0; i < n; ++i) out[i] = keys[static_cast<size_t>(i)].second;
  }

 private:
  uint64_t number(int64_t element) const {
    const uint64_t index = first_ + static_cast<uint64_t>(element);
    const auto block = base::philox(stream_, index / 2);
    return wide(block.data() + 2 * (index % 2));
  }

  std::vector<double> weights_;
  const Stream stream_;
  const uint64_t first_;
};

// A CPU generator for ATen's own kernels, seeded with the first word of the stream.
at::Generator own_generator(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator(base::philox(stream_of(seed, offset), 0)[0]);
}

Tensor multinomial(const Tensor& probs, int64_t num_samples, bool replacement, int64_t seed,
                   int64_t offset) {
  const int64_t rows = probs.dim() == 1 ? 1 : probs.size(0);
  const int64_t categories = probs.size(-1);
  const auto dtype = probs.options().dtype(c10::kLong);
  Tensor result =
      probs.dim() == 1 ? at::empty({num_samples}, dtype) : at::empty({rows, num_samples}, dtype);
  int64_t* out = result.mutable_data_ptr<int64_t>();
  const Elements elements(probs);
  const Stream stream = stream_of(seed, offset);
  std::atomic<bool> invalid = false;
  const int64_t grain = std::max<int64_t>(1, 4096 / (categories + num_samples));
  at::parallel_for(0, rows, grain, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      std::vector<double> weights(static_cast<size_t>(categories));
      load(probs, elements, row * categories, (row + 1) * categories, weights.data());
      double total = 0;
      bool valid = true;
      for (const double weight : weights) {
        valid &= std::isfinite(weight) && weight >= 0;
        total += weight;
      }
      if (!valid || !(total > 0)) {
        invalid.store(true, std::memory_order_relaxed);
        return;
      }
      const int64_t draws = replacement ? num_samples : categories;
      Row draw(std::move(weights), stream, row * draws);
      if (replacement) {
        draw.with_replacement(num_samples, out + row * num_samples);
      } else {
        draw.without_replacement(num_samples, out + row * num_samples);
      }
    }
  });
  if (invalid) {
    // PyTorch's own kernel says what is wrong with the weights.
    at::_ops::multinomial::call(probs, num_samples, replacement, own_generator(seed, offset));
    TORCH_CHECK(false, "invalid multinomial distribution");
  }
  return result;
}

// Samplers that reject draws are ATen's: reproducible, one element after the other.
Tensor poisson(const Tensor& self, int64_t seed, int64_t offset) {
  return at::_ops::poisson::call(self, own_generator(seed, offset));
}

Tensor binomial(const Tensor& count, const Tensor& prob, int64_t seed, int64_t offset) {
  const auto [n, p] = at::expand_outplace(count, prob);
  return at::_ops::binomial::call(*n, *p, own_generator(seed, offset));
}

Tensor standard_gamma(const Tensor& self, int64_t seed, int64_t offset) {
  return at::_ops::_standard_gamma::call(self, own_generator(seed, offset));
}

Tensor sample_dirichlet(const Tensor& self, int64_t seed, int64_t offset) {
  return at::_ops::_sample_dirichlet::call(self, own_generator(seed, offset));
}

TORCH_LIBRARY_IMPL(acc, CPU, m) {
  m.impl("native_dropout", &native_dropout);
  m.impl("randperm_", &randperm);
  m.impl("multinomial", &multinomial);
  m.impl("poisson", &poisson);
  m.impl("binomial", &binomial);
  m.impl("standard_gamma", &standard_gamma);
  m.impl("sample_dirichlet", &sample_dirichlet);
}

}  // namespace
}  // namespace acc::library
