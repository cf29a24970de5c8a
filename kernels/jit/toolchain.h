#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "kernels/jit/compiler.h"
#include "kernels/jit/files.h"
#include "kernels/jit/settings.h"

// What kernels are made for: how a text becomes a library, and a library functions.
namespace acc::jit {

class Toolchain {
 public:
  Toolchain() = default;
  Toolchain(const Toolchain&) = delete;
  Toolchain& operator=(const Toolchain&) = delete;
  virtual ~Toolchain() = default;

  // Tells its kernels from those of others in this process.
  virtual std::string name() const = 0;
  // Kernels that are compiled as one text, at most. The rest of them goes side by side.
  virtual size_t most_together() const = 0;

  // Throws base::Error when there is none.
  virtual Compiler find(const Settings& settings) const = 0;
  // The first line of what it says about its version. Throws base::Error when it says nothing.
  virtual std::string version(const Compiler& compiler, const Settings& settings) const = 0;
  // What else decides what it makes of a text: options, and the machine if it compiles for that.
  virtual std::string options() const = 0;
  // Throws base::Error when the compiler fails, takes too long, or writes something else.
  virtual Built build(const Compiler& compiler, const Settings& settings,
                      const Workspace& workspace, std::string_view text) const = 0;

  // Loads the library behind a descriptor, which may be closed then, or one that is in no file.
  // Null when it cannot be loaded, and `problem` says why.
  virtual void* load(int fd, std::string& problem) const = 0;
  virtual void* load(std::string_view bytes, std::string& problem) const = 0;
  // Null if there is none of that name.
  virtual void* find_function(void* library, const std::string& name) const = 0;
};

// The C++ compiler of the machine, for functions that this process calls.
const Toolchain& host_toolchain();

}  // namespace acc::jit
