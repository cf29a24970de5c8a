#pragma once

#include <string>
#include <vector>

#include "kernels/jit/toolchain.h"

// NVRTC, in a process of its own: it can be stopped, several run side by side, and what it loads
// and leaves behind is gone with it. It needs no GPU; loading what it makes does.
namespace acc::jit {

class GpuToolchain : public Toolchain {
 public:
  // `program`: of nvrtc_main.cpp. `library`: NVRTC's, a path, or a name that the loader finds.
  // `architecture`: what is compiled for, as sm_90. `options`: for NVRTC.
  GpuToolchain(std::string program, std::string library, std::string architecture,
               std::vector<std::string> options);

  std::string name() const override { return architecture_; }
  // One takes NVRTC about 0.15 s, and its start 0.05.
  size_t most_together() const override { return 4; }

  Compiler find(const Settings& settings) const override;
  std::string version(const Compiler& compiler, const Settings& settings) const override;
  std::string options() const override;
  Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
              std::string_view text) const override;

 private:
  const std::string program_;
  const std::string library_;
  const std::string architecture_;
  const std::vector<std::string> options_;
};

}  // namespace acc::jit
