#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace acc::jit {

// What a compilation takes from the environment. It is read on the thread that asks for kernels,
// because the program may change its environment while a compiler is at work.
struct Settings {
  std::string compiler;         // ACC_CXX: a path, a name, or ""
  std::string search_path;      // PATH
  std::string cache_directory;  // "" when no variable says where
  uint64_t cache_bytes = 0;
  std::chrono::milliseconds time_limit{0};
  std::vector<std::string> temporary;    // directories for temporary files, the best first
  std::vector<std::string> environment;  // NAME=value, for the compiler

  // Throws base::Error when a variable of ours has a value that is not allowed.
  static Settings read();
};

}  // namespace acc::jit
