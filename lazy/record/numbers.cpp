#include "lazy/record/numbers.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include "csrc/base/check.h"

namespace acc::record {

void append_number(const at::Tensor& tensor, std::vector<int64_t>* values) {
  const void* data = tensor.const_data_ptr();
  const auto integer = [&](auto example) {
    values->push_back(static_cast<int64_t>(*static_cast<const decltype(example)*>(data)));
  };
  const auto real = [&](auto example) {
    values->push_back(to_bits(static_cast<double>(*static_cast<const decltype(example)*>(data))));
  };
  const auto complex = [&](auto example) {
    const auto value = *static_cast<const decltype(example)*>(data);
    values->push_back(to_bits(static_cast<double>(value.real())));
    values->push_back(to_bits(static_cast<double>(value.imag())));
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
