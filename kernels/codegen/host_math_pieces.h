#pragma once

#include <span>
#include <string_view>

// The pieces that host_math() puts together. Private to kernels/codegen/host_math*.cpp.
namespace acc::codegen::host_math_detail {

struct Piece {
  std::string_view name;
  std::string_view uses;  // names of other pieces, separated by blanks
  std::string_view text;
  bool internal = false;  // used by other pieces only, not a name for callers of host_math()
};

// Bits, masks, sums of products.
std::span<const Piece> helper_pieces();
// One instruction each, where the machine has it.
std::span<const Piece> exact_pieces();
std::span<const Piece> exponential_pieces();
std::span<const Piece> logarithm_pieces();
std::span<const Piece> trigonometric_pieces();
std::span<const Piece> error_function_pieces();
std::span<const Piece> power_pieces();

}  // namespace acc::codegen::host_math_detail
