#include <limits>

#include "csrc/base/check.h"
#include "kernels/jit/library.h"
#include "kernels/jit/machine.h"
#include "kernels/jit/toolchain.h"

namespace acc::jit {
namespace {

class HostToolchain final : public Toolchain {
 public:
  std::string name() const override { return "host"; }
  // A run of the compiler costs as much as ten kernels.
  size_t most_together() const override { return std::numeric_limits<size_t>::max(); }

  Compiler find(const Settings& settings) const override { return find_compiler(settings); }
  std::string version(const Compiler& compiler, const Settings& settings) const override {
    return compiler_version(compiler, {}, settings);
  }
  std::string options() const override {
    return base::concat(compiler_options(), processor_text(), c_library_text());
  }
  Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
              std::string_view text) const override {
    return jit::build(compiler, settings, workspace, text);
  }

  void* load(int fd, std::string& problem) const override { return load_library(fd, problem); }
  void* load(std::string_view bytes, std::string& problem) const override {
    void* library = load_library(bytes, problem);
    if (library == nullptr) problem += ". Set TMPDIR to a directory that may hold programs";
    return library;
  }
  void* find_function(void* library, const std::string& name) const override {
    return jit::find_function(library, name);
  }
};

}  // namespace

const Toolchain& host_toolchain() {
  static const auto& toolchain = *new HostToolchain;  // threads may compile when the process ends
  return toolchain;
}

}  // namespace acc::jit
