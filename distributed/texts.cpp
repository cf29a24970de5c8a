#include "distributed/texts.h"

#include <charconv>
#include <system_error>

namespace acc::distributed {

std::vector<uint64_t> numbers(std::string_view text) {
  std::vector<uint64_t> found;
  for (const char* at = text.data(); at != text.data() + text.size();) {
    if (*at == ' ') {
      ++at;
      continue;
    }
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(at, text.data() + text.size(), value, 16);
    if (error != std::errc()) break;
    found.push_back(value);
    at = end;
  }
  return found;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }
std::string behind_first_line(const std::string& text) {
  const size_t line = text.find('\n');
  return line == std::string::npos ? "" : text.substr(line + 1);
}

std::string hex(uint64_t value) {
  char text[17];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

}  // namespace acc::distributed
