#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real_ops.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/library/random.h"

// CPU kernels of the random operators that fill a tensor.
namespace acc::library {
namespace {

using at::Tensor;

// Real and imaginary parts of a complex tensor are elements of their own; the standard deviation of
// a complex normal number is that of both together.
Tensor real_view(const Tensor& self) {
  return self.is_complex() ? at::_ops::view_as_real::call(self) : self;
}

template <class T>
void fill_uniform(const Tensor& self, double from, double to, Stream stream) {
  const float low = static_cast<float>(static_cast<T>(from));
  const float high = static_cast<float>(static_cast<T>(to));
  const float span = high - low;
  constexpr int kBits = std::numeric_limits<T>::digits;
  const float unit = std::ldexp(1.0F, -kBits);
  fill_random<1, float>(self, stream, [&](const uint32_t* words, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
      const float value = static_cast<float>(words[i] >> (32 - kBits)) * unit * span + low;
      // Rounding may reach the upper end, which is excluded.
      out[i] = static_cast<float>(static_cast<T>(value)) < high ? value : low;
    }
  });
}

void fill_uniform_double(const Tensor& self, double from, double to, Stream stream) {
  fill_random<2, double>(self, stream, [&](const uint32_t* words, int64_t n, double* out) {
    for (int64_t i = 0; i < n; ++i) {
      const double value = unit_double(wide(words + 2 * i)) * (to - from) + from;
      out[i] = value < to ? value : from;
    }
  });
}

Tensor& uniform(Tensor& self, double from, double to, int64_t seed, int64_t offset) {
  const Tensor target = real_view(self);
  const Stream stream = stream_of(seed, offset);
  switch (target.scalar_type()) {
    case c10::kDouble:
      fill_uniform_double(target, from, to, stream);
      break;
    case c10::kHalf:
      fill_uniform<c10::Half>(target, from, to, stream);
      break;
    case c10::kBFloat16:
      fill_uniform<c10::BFloat16>(target, from, to, stream);
      break;
    default:
      fill_uniform<float>(target, from, to, stream);
  }
  return self;
}

// Calls use(begin, n, values) with the standard normal numbers of each chunk, in float or double,
// and stores what it makes of them.
template <class Use>
void fill_normal(const Tensor& self, Stream stream, const Use& use) {
  const Elements elements(self);
  if (self.scalar_type() == c10::kDouble) {
    for_chunks<2>(self.numel(), stream, [&](const uint32_t* words, int64_t begin, int64_t n) {
      double values[kRandomChunk];
      for (int64_t i = 0; i < n; i += 2) {
        const auto pair = normal_doubles(wide(words + 2 * i), wide(words + 2 * i + 2));
        values[i] = pair[0];
        values[i + 1] = pair[1];
      }
      use(begin, n, values);
      store(self, elements, begin, begin + n, values);
    });
  } else {
    for_chunks<1>(self.numel(), stream, [&](const uint32_t* words, int64_t begin, int64_t n) {
      float values[kRandomChunk];
      normal_floats(words, word_groups(n), values);
      use(begin, n, values);
      store(self, elements, begin, begin + n, values);
    });
  }
}

Tensor& normal(Tensor& self, double mean, double std, int64_t seed, int64_t offset) {
  if (self.is_complex()) std /= std::numbers::sqrt2;
  fill_normal(real_view(self), stream_of(seed, offset),
              [&]<class T>(int64_t, int64_t n, T* values) {
                const T scale = static_cast<T>(std);
                const T shift = static_cast<T>(mean);
                for (int64_t i = 0; i < n; ++i) values[i] = values[i] * scale + shift;
              });
  return self;
}

Tensor& log_normal(Tensor& self, double mean, double std, int64_t seed, int64_t offset) {
  fill_normal(self, stream_of(seed, offset), [&]<class T>(int64_t, int64_t n, T* values) {
    const T scale = static_cast<T>(std);
    const T shift = static_cast<T>(mean);
    for (int64_t i = 0; i < n; ++i) values[i] = std::exp(values[i] * scale + shift);
  });
  return self;
}

Tensor& exponential(Tensor& self, double lambd, int64_t seed, int64_t offset) {
  const Stream stream = stream_of(seed, offset);
  if (self.scalar_type() == c10::kDouble) {
    fill_random<2, double>(self, stream, [&](const uint32_t* words, int64_t n, double* out) {
      for (int64_t i = 0; i < n; ++i) {
        out[i] = -std::log(open_double(wide(words + 2 * i))) / lambd;
      }
    });
  } else {
    const float rate = static_cast<float>(lambd);
    fill_random<1, float>(self, stream, [&](const uint32_t* words, int64_t n, float* out) {
      exponential_floats(words, word_groups(n), out);
      for (int64_t i = 0; i < n; ++i) out[i] /= rate;
    });
  }
  return self;
}

// The inverse of the distribution function, applied to a uniform number in (0, 1), in double
// precision for every dtype.
template <class Inverse>
void fill_inverse(const Tensor& self, int64_t seed, int64_t offset, const Inverse& inverse) {
  fill_random<2, double>(self, stream_of(seed, offset),
                         [&](const uint32_t* words, int64_t n, double* out) {
                           for (int64_t i = 0; i < n; ++i) {
                             out[i] = inverse(open_double(wide(words + 2 * i)));
                           }
                         });
}

Tensor& cauchy(Tensor& self, double median, double sigma, int64_t seed, int64_t offset) {
  fill_inverse(self, seed, offset,
               [&](double u) { return median + sigma * std::tan(std::numbers::pi * (u - 0.5)); });
  return self;
}

Tensor& geometric(Tensor& self, double p, int64_t seed, int64_t offset) {
  const double log_failure = std::log1p(-p);
  fill_inverse(self, seed, offset,
               [&](double u) { return std::max(1.0, std::ceil(std::log(u) / log_failure)); });
  return self;
}

Tensor& bernoulli(Tensor& self, int64_t below, int64_t seed, int64_t offset) {
  const auto limit = static_cast<uint64_t>(below);
  fill_random<1, float>(self, stream_of(seed, offset),
                        [&](const uint32_t* words, int64_t n, float* out) {
                          flag_floats(words, word_groups(n), limit, out);
                        });
  return self;
}

Tensor& random(Tensor& self, int64_t from, int64_t count, int64_t seed, int64_t offset) {
  using Wide = unsigned __int128;
  const Stream stream = stream_of(seed, offset);
  const uint64_t base = static_cast<uint64_t>(from);
  const uint64_t most = static_cast<uint64_t>(count) - 1;
  const Wide range = Wide{most} + 1;
  if (most == std::numeric_limits<uint64_t>::max()) {
    fill_random<2, int64_t>(self, stream, [&](const uint32_t* words, int64_t n, int64_t* out) {
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>(base + wide(words + 2 * i));
    });
  } else if (most < uint64_t{1} << 32) {
    // Products instead of remainders: a number's probability is off by less than 2^-32 of itself.
    fill_random<2, int64_t>(self, stream, [&](const uint32_t* words, int64_t n, int64_t* out) {
      for (int64_t i = 0; i < n; ++i) {
        const auto drawn = static_cast<uint64_t>((Wide{wide(words + 2 * i)} * range) >> 64);
        out[i] = static_cast<int64_t>(base + drawn);
      }
    });
  } else {
    fill_random<4, int64_t>(self, stream, [&](const uint32_t* words, int64_t n, int64_t* out) {
      for (int64_t i = 0; i < n; ++i) {
        const Wide low = (Wide{wide(words + 4 * i)} * range) >> 64;
        const Wide high = Wide{wide(words + 4 * i + 2)} * range;
        out[i] = static_cast<int64_t>(base + static_cast<uint64_t>((high + low) >> 64));
      }
    });
  }
  return self;
}

// One probability, or standard deviation, for each element.
Tensor& bernoulli_tensor(Tensor& self, const Tensor& p, int64_t seed, int64_t offset) {
  const Tensor given = p.expand(self.sizes());
  const Elements source(given);
  const Elements target(self);
  for_chunks<1>(self.numel(), stream_of(seed, offset),
                [&](const uint32_t* words, int64_t begin, int64_t n) {
                  double values[kRandomChunk];
                  load(given, source, begin, begin + n, values);
                  for (int64_t i = 0; i < n; ++i) {
                    TORCH_CHECK(values[i] >= 0 && values[i] <= 1,
                                "Expected p_in >= 0 && p_in <= 1 to be true, but got false: "
                                "bernoulli was given the probability ",
                                values[i], ".");
                    values[i] = words[i] < words_below(values[i]) ? 1.0 : 0.0;
                  }
                  store(self, target, begin, begin + n, values);
                });
  return self;
}

Tensor& normal_std(Tensor& self, const Tensor& std, int64_t seed, int64_t offset) {
  // A complex number's deviation belongs to both of its parts.
  const Tensor target = real_view(self);
  Tensor given = std.expand(self.sizes());
  double factor = 1.0;
  if (self.is_complex()) {
    given = given.unsqueeze(-1).expand(target.sizes());
    factor = 1.0 / std::numbers::sqrt2;
  }
  const Elements source(given);
  const auto scale = [&]<class T>(int64_t begin, int64_t n, T* values) {
    T deviations[kRandomChunk];
    load(given, source, begin, begin + n, deviations);
    for (int64_t i = 0; i < n; ++i) {
      TORCH_CHECK(deviations[i] >= 0, "normal expects all elements of std >= 0.0");
      values[i] *= deviations[i] * static_cast<T>(factor);
    }
  };
  fill_normal(target, stream_of(seed, offset), scale);
  return self;
}

TORCH_LIBRARY_IMPL(acc, CPU, m) {
  m.impl("uniform_", &uniform);
  m.impl("normal_", &normal);
  m.impl("log_normal_", &log_normal);
  m.impl("exponential_", &exponential);
  m.impl("cauchy_", &cauchy);
  m.impl("geometric_", &geometric);
  m.impl("bernoulli_", &bernoulli);
  m.impl("bernoulli_tensor_", &bernoulli_tensor);
  m.impl("normal_std_", &normal_std);
  m.impl("random_", &random);
}

}  // namespace
}  // namespace acc::library
