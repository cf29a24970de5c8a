#include "lazy/record/numbers.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include "csrc/base/check.h"

namespace acc::record {

void append_number(const at::Tensor& tensor, std::vector<int64_t>* values) {
  const void* data = tensor.const_data_ptr();
  // Some operators, as addmm, get what is to be conjugated or negated as it is in memory.
  const bool negated = tensor.is_neg();
  const bool conjugated = tensor.is_conj();
  const auto integer = [&](auto example) {
    const auto value = static_cast<int64_t>(*static_cast<const decltype(example)*>(data));
    values->push_back(negated ? -value : value);
  };
  const auto part = [&](double value, bool negative) {
    values->push_back(to_bits(negative ? -value : value));
  };
  const auto real = [&](auto example) {
    part(static_cast<double>(*static_cast<const decltype(example)*>(data)), negated);
  };
  const auto complex = [&](auto example) {
    const auto value = *static_cast<const decltype(example)*>(data);
    part(static_cast<double>(value.real()), negated);
    part(static_cast<double>(value.imag()), negated != conjugated);
  };
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      return real(double{});
    case c10::kFloat:
      return real(float{});
    case c10::kHalf:
      return real(c10::Half{});
    case c10::kBFloat16:
      return real(c10::BFloat16{});
    case c10::kLong:
      return integer(int64_t{});
    case c10::kInt:
      return integer(int32_t{});
    case c10::kShort:
      return integer(int16_t{});
    case c10::kChar:
      return integer(int8_t{});
    case c10::kByte:
      return integer(uint8_t{});
    case c10::kBool:
      return integer(bool{});
    case c10::ScalarType::UInt16:
      return integer(uint16_t{});
    case c10::ScalarType::UInt32:
      return integer(uint32_t{});
    case c10::ScalarType::UInt64:
      return integer(uint64_t{});
    case c10::kComplexHalf:
      return complex(c10::complex<c10::Half>{});
    case c10::kComplexFloat:
      return complex(c10::complex<float>{});
    case c10::kComplexDouble:
      return complex(c10::complex<double>{});
    default:
      ACC_FAIL("[acc] a CPU tensor of type ", c10::toString(tensor.scalar_type()),
               " cannot stand beside acc tensors. Move it with .to(\"acc\") first.");
  }
}

}  // namespace acc::record
