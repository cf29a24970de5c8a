#include "kernels/jit/machine.h"

#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#if defined(__GLIBC__)
#include <gnu/libc-version.h>
#endif

namespace acc::jit {

std::string processor_text(std::istream& cpuinfo) {
  std::string line;
  while (std::getline(cpuinfo, line)) {
    const std::string_view text(line);
    if (!text.starts_with("flags") && !text.starts_with("Features")) continue;  // x86, ARM
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 1));
    std::set<std::string> sorted;
    for (std::string word; words >> word;) sorted.insert(word);
    std::string result;
    for (const std::string& word : sorted) result += word + " ";
    return result;
  }
  return "";
}

std::string processor_text() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  return processor_text(cpuinfo);
}

std::string c_library_text() {
#if defined(__GLIBC__)
  return gnu_get_libc_version();
#else
  return "";
#endif
}

}  // namespace acc::jit
