#pragma once

#include <cstdint>

// The element types by the numbers that the words hold: c10::ScalarType's, which are part of
// PyTorch's serialisation format and so never change. Only those that generated kernels know have a
// name.
namespace acc::graph::dtype {

inline constexpr uint8_t kU8 = 0;
inline constexpr uint8_t kI8 = 1;
inline constexpr uint8_t kI16 = 2;
inline constexpr uint8_t kI32 = 3;
inline constexpr uint8_t kI64 = 4;
inline constexpr uint8_t kF16 = 5;
inline constexpr uint8_t kF32 = 6;
inline constexpr uint8_t kF64 = 7;
inline constexpr uint8_t kBool = 11;
inline constexpr uint8_t kBF16 = 15;

constexpr bool is_half(uint8_t dtype) { return dtype == kF16 || dtype == kBF16; }
constexpr bool is_floating(uint8_t dtype) {
  return dtype == kF32 || dtype == kF64 || is_half(dtype);
}
constexpr bool is_integer(uint8_t dtype) { return dtype <= kI64; }

// Types of which generated kernels load and store elements.
constexpr bool is_known(uint8_t dtype) {
  return is_integer(dtype) || is_floating(dtype) || dtype == kBool;
}

// The type in which kernels compute with elements of `dtype`: half types in float32, as ATen's CPU
// and CUDA kernels do.
constexpr uint8_t computed_in(uint8_t dtype) { return is_half(dtype) ? kF32 : dtype; }

}  // namespace acc::graph::dtype
