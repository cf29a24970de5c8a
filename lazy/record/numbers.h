#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "lazy/graph/words.h"

// CPU tensors of no dimension: PyTorch lets them stand beside tensors of any device, and Python
// numbers arrive as such. They are recorded as numbers, by value.
namespace acc::record {

inline int64_t to_bits(double value) { return std::bit_cast<int64_t>(value); }
inline double from_bits(int64_t bits) { return std::bit_cast<double>(bits); }

// The tag word of `tensor`, a CPU tensor of no dimension.
inline int64_t number_tag(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto flags = static_cast<uint8_t>(graph::kValueFlag |
                                          (impl->is_wrapped_number() ? graph::kWrappedFlag : 0));
  return graph::make_tag(graph::Tag::kNumber,
                         static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype())), flags);
}

// Appends the number's one or two words.
void append_number(const at::Tensor& tensor, std::vector<int64_t>* values);

}  // namespace acc::record
