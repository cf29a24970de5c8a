#include <limits>

#include "csrc/base/check.h"
#include "kernels/library/random.h"

namespace acc::library {

Elements::Elements(const at::TensorBase& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t size = tensor.size(d);
    const int64_t stride = tensor.stride(d);
    if (size == 1) continue;
    if (!sizes_.empty() && strides_.back() == stride * size) {
      sizes_.back() *= size;
      strides_.back() = stride;
    } else {
      sizes_.push_back(size);
      strides_.push_back(stride);
    }
  }
  if (sizes_.empty()) {
    sizes_.push_back(1);
    strides_.push_back(1);
  }
}

namespace {

// Conversion to an integer outside its range is undefined; a geometric number of a tiny probability
// is, and ends at the largest value.
template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<From, double> && std::is_integral_v<To> &&
                !std::is_same_v<To, bool>) {
    constexpr auto kMax = std::numeric_limits<To>::max();
    return value < static_cast<double>(kMax) ? static_cast<To>(value) : kMax;
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_same_v<To, c10::Half> || std::is_same_v<To, c10::BFloat16>) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <class T>
void load_as(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
             T* out) {
  AT_DISPATCH_ALL_TYPES_AND3(
      c10::kHalf, c10::kBFloat16, c10::kBool, tensor.scalar_type(), "acc_random_load", [&] {
        const scalar_t* data = tensor.const_data_ptr<scalar_t>();
        elements.visit(begin, end, [&](int64_t position, int64_t stride, int64_t n) {
          const scalar_t* from = data + position;
          for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(from[i * stride]);
          out += n;
        });
      });
}

template <class T>
void store_as(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
              const T* values) {
  const auto put = [&]<class To>(To* data) {
    elements.visit(begin, end, [&](int64_t position, int64_t stride, int64_t n) {
      To* to = data + position;
      if (stride == 1) {
        for (int64_t i = 0; i < n; ++i) to[i] = convert<To>(values[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) to[i * stride] = convert<To>(values[i]);
      }
      values += n;
    });
  };
  switch (tensor.scalar_type()) {
    case c10::ScalarType::UInt16:
      return put(tensor.mutable_data_ptr<uint16_t>());
    case c10::ScalarType::UInt32:
      return put(tensor.mutable_data_ptr<uint32_t>());
    case c10::ScalarType::UInt64:
      return put(tensor.mutable_data_ptr<uint64_t>());
    default:
      break;
  }
  AT_DISPATCH_ALL_TYPES_AND3(c10::kHalf, c10::kBFloat16, c10::kBool, tensor.scalar_type(),
                             "acc_random_store", [&] { put(tensor.mutable_data_ptr<scalar_t>()); });
}

}  // namespace

void load(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
          float* out) {
  load_as(tensor, elements, begin, end, out);
}

void load(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
          double* out) {
  load_as(tensor, elements, begin, end, out);
}

void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const float* values) {
  store_as(tensor, elements, begin, end, values);
}

void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const double* values) {
  store_as(tensor, elements, begin, end, values);
}

void store(const at::TensorBase& tensor, const Elements& elements, int64_t begin, int64_t end,
           const int64_t* values) {
  store_as(tensor, elements, begin, end, values);
}

}  // namespace acc::library
