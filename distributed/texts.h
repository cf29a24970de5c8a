#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// How ranks write to their group's store.
namespace acc::distributed {

// Numbers in hexadecimal, with blanks between; ends at a line's end.
std::vector<uint64_t> numbers(std::string_view text);
std::string hex(uint64_t value);

std::string first_line(const std::string& text);
std::string behind_first_line(const std::string& text);

}  // namespace acc::distributed
