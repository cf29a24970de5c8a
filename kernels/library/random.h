#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>

#include "csrc/base/philox.h"
#include "kernels/library/random_words.h"

// What the kernels of the random operators (the library `acc`, registered in random.cpp) share.
//
// Element number i of a tensor, counted in logical (row-major) order whatever the strides are, gets
// words W i .. W i + W - 1 of the stream, where W is 1, 2 or 4 and belongs to the operator and the
// dtype; word j is word j % 4 of Philox block j / 4. So a value depends on seed, offset and index
// alone. docs/random.md lists W and the formula of every operator.
namespace acc::library {

using base::Stream;
using base::words_below;

inline Stream stream_of(int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
}

// Elements per chunk: words and numbers of a chunk stay in the first-level cache.
inline constexpr int64_t kRandomChunk = 512;
// Chunks that are worth another thread: 32,768 elements, as in ATen.
inline constexpr int64_t kRandomGrain = 64;

// The elements of a strided tensor in logical order.
class Elements {
 public:
  explicit Elements(const at::TensorBase& tensor);

  // Calls run(position, stride, n) for pieces of elements [begin, end): n elements, the first at
  // `position` (in elements, from the tensor's first), the others `stride` apart.
  template <class Run>
  void visit(int64_t begin, int64_t end, const Run& run) const {
    int64_t inner = sizes_.back();
    while (begin < end) {
      int64_t rest = begin / inner;
      const int64_t first = begin - rest * inner;
      int64_t position = first * strides_.back();
      for (size_t d = sizes_.size() - 1; d-- > 0;) {
        position += rest % sizes_[d] * strides_[d];
        rest /= sizes_[d];
      }
      const int64_t n = std::min(inner - first, end - begin);
      run(position, strides_.back(), n);
      begin += n;
    }
  }

 private:
  // Neighbouring dimensions that walk on like one are one; never empty.
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
};

// The elements [begin, end) of a tensor of any real dtype, converted.
void load(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
          float* out);
void load(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
          double* out);

// Writes `values`, converted to the tensor's dtype (integers and bool included).
void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const float* values);
void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const double* values);
void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const int64_t* values);

// Calls make(words, begin, n) for the chunks [begin, begin + n) of `numel` elements, in parallel;
// element begin + k has words[W k] .. words[W k + W - 1].
template <int W, class Make>
void for_chunks(int64_t numel, Stream stream, const Make& make) {
  static_assert(W == 1 || W == 2 || W == 4);
  const int64_t chunks = (numel + kRandomChunk - 1) / kRandomChunk;
  at::parallel_for(0, chunks, kRandomGrain, [&](int64_t from, int64_t to) {
    alignas(64) uint32_t words[W * kRandomChunk];
    for (int64_t chunk = from; chunk < to; ++chunk) {
      const int64_t begin = chunk * kRandomChunk;
      const int64_t n = std::min(kRandomChunk, numel - begin);
      fill_words(stream, static_cast<uint64_t>(W * begin / 4), word_groups(W * n), words);
      make(words, begin, n);
    }
  });
}

// Fills `self` with what make(words, n, out) writes: n numbers of type T, made in whole groups, so
// `out` has room for n rounded up to kWordGroup, and `words` holds as many.
template <int W, class T, class Make>
void fill_random(const at::TensorBase& self, Stream stream, const Make& make) {
  const Elements elements(self);
  for_chunks<W>(self.numel(), stream, [&](const uint32_t* words, int64_t begin, int64_t n) {
    alignas(64) T values[kRandomChunk];
    make(words, n, values);
    store(self, elements, begin, begin + n, values);
  });
}

}  // namespace acc::library
