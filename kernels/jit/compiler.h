#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/jit/files.h"
#include "kernels/jit/process.h"
#include "kernels/jit/settings.h"

// Compilers: which one it is, and what it makes of a text.
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
  bool ours = false;  // a part of this package, rather than of the machine

  friend bool operator==(const Compiler&, const Compiler&) = default;
};

// The program behind a path; none where it is missing or may not be run.
std::optional<FileIdentity> identity_of(const std::string& path);

// The first line of what the compiler says when it is called with `arguments` and --version. Throws
// base::Error when it says nothing.
std::string compiler_version(const Compiler& compiler, const std::vector<std::string>& arguments,
                             const Settings& settings);

struct Built {
  std::string source;  // the text's file, in the workspace
  std::string path;    // the result's
  std::string bytes;   // its content
  // Whether the compiler was the same before and after. If not, nobody knows which one made this.
  bool same_compiler = true;
};

// The parts of compiling: the text in a file, a run, the result out of its file, and what is said
// when one of them does not succeed. They throw base::Error.
Built files_for(const Workspace& workspace, const char* source, const char* result,
                std::string_view text);
Outcome run_compiler(const Compiler& compiler, const std::vector<std::string>& arguments,
                     const Settings& settings, const Workspace* workspace);
void take_result(const Compiler& compiler, const Outcome& outcome, Built& built);
[[noreturn]] void compiler_failed(const Compiler& compiler, const std::string& what,
                                  const std::string& output);

// --- of the host

// ACC_CXX, or the first of g++, clang++ and c++ in PATH. Throws base::Error when there is none.
Compiler find_compiler(const Settings& settings);

// The options that decide what comes out, as one text: a part of the key of a kernel.
std::string compiler_options();

// Compiles a text to a shared library. Throws base::Error when the compiler fails, takes too long,
// or writes something else than a library.
Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
            std::string_view text);

}  // namespace acc::jit
