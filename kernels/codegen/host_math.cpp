#include "kernels/codegen/host_math.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "csrc/base/check.h"
#include "kernels/codegen/host_math_pieces.h"

namespace acc::codegen {
namespace {

using host_math_detail::Piece;

using Table = std::map<std::string_view, const Piece*>;

const Table& table() {
  static const Table all = [] {
    Table result;
    for (const auto pieces :
         {host_math_detail::helper_pieces(), host_math_detail::exact_pieces(),
          host_math_detail::exponential_pieces(), host_math_detail::logarithm_pieces(),
          host_math_detail::trigonometric_pieces(), host_math_detail::error_function_pieces(),
          host_math_detail::power_pieces()}) {
      for (const Piece& piece : pieces) ACC_CHECK(result.emplace(piece.name, &piece).second);
    }
    return result;
  }();
  return all;
}

// Appends a piece after everything it uses.
void append(const Piece& piece, std::set<std::string_view>& written, std::string& text) {
  if (!written.insert(piece.name).second) return;
  std::string_view rest = piece.uses;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(' '), rest.size());
    const std::string_view name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const auto used = table().find(name);
    ACC_CHECK(used != table().end());
    append(*used->second, written, text);
  }
  text += piece.text;
}

}  // namespace

std::string host_math(const std::vector<std::string>& names) {
  const std::set<std::string> sorted(names.begin(), names.end());
  std::set<std::string_view> written;
  // g++ remarks on vectors as arguments where the machine has no registers of that size; clang
  // calls a function that is used twice
  std::string text =
      "#pragma GCC diagnostic ignored \"-Wpsabi\"\n"
      "#define HOST_MATH static inline __attribute__((always_inline))\n";
  for (const std::string& name : sorted) {
    const auto piece = table().find(name);
    ACC_CHECK(piece != table().end() && !piece->second->internal,
              "[host_math] there is no function '", name,
              "'. host_math_names() lists those there are.");
    append(*piece->second, written, text);
  }
  return text;
}

std::vector<std::string> host_math_names() {
  std::vector<std::string> names;
  for (const auto& [name, piece] : table()) {
    if (!piece->internal) names.emplace_back(name);
  }
  return names;
}

}  // namespace acc::codegen
