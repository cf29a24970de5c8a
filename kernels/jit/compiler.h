#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/jit/files.h"
#include "kernels/jit/settings.h"

// The compiler of the machine: which one it is, and what it makes of a text.
namespace acc::jit {

// Changes when the file behind a path is replaced.
struct FileIdentity {
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

struct Compiler {
  std::string path;
  FileIdentity identity;

  friend bool operator==(const Compiler&, const Compiler&) = default;
};

// ACC_CXX, or the first of g++, clang++ and c++ in PATH. Throws base::Error when there is none.
Compiler find_compiler(const Settings& settings);

// The first line of what it says about its version. Throws base::Error when it says nothing.
std::string compiler_version(const Compiler& compiler, const Settings& settings);

// The options that decide what comes out, as one text: a part of the key of a kernel.
std::string compiler_options();

struct Built {
  std::string path;   // the library, in the workspace
  std::string bytes;  // its content
  // Whether the compiler was the same before and after. If not, nobody knows which one made this.
  bool same_compiler = true;
};

// Compiles a text to a shared library. Throws base::Error when the compiler fails, takes too long,
// or writes something else than a library.
Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
            std::string_view text);

}  // namespace acc::jit
