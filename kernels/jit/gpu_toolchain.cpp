#include "kernels/jit/gpu_toolchain.h"

#include <optional>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "kernels/jit/library.h"

namespace acc::jit {

GpuToolchain::GpuToolchain(std::string program, std::string library, std::string architecture,
                           std::vector<std::string> options)
    : program_(std::move(program)),
      library_(std::move(library)),
      architecture_(std::move(architecture)),
      options_(std::move(options)) {}

Compiler GpuToolchain::find(const Settings&) const {
  const std::optional<FileIdentity> identity = identity_of(program_);
  ACC_CHECK(identity.has_value(), "[jit] ", program_,
            ", which compiles kernels for GPUs, is missing or may not be run. Kernels run unfused. "
            "Install the package again.");
  return {program_, *identity, /*ours=*/true};
}

std::string GpuToolchain::version(const Compiler& compiler, const Settings& settings) const {
  return compiler_version(compiler, {library_}, settings);
}

std::string GpuToolchain::options() const {
  std::string text = "--gpu-architecture=" + architecture_;
  for (const std::string& option : options_) text += base::concat(" ", option);
  return text;
}

Built GpuToolchain::build(const Compiler& compiler, const Settings& settings,
                          const Workspace& workspace, std::string_view text) const {
  Built built = files_for(workspace, "kernels.cu", "kernels.cubin", text);
  std::vector<std::string> arguments = {library_, built.source, built.path,
                                        "--gpu-architecture=" + architecture_};
  arguments.insert(arguments.end(), options_.begin(), options_.end());
  const Outcome outcome = run_compiler(compiler, arguments, settings, &workspace);
  if (!outcome.success) compiler_failed(compiler, outcome.problem, outcome.output);
  take_result(compiler, outcome, built);
  if (!is_whole_cubin(built.bytes)) {
    compiler_failed(compiler, "wrote something that is no whole cubin", outcome.output);
  }
  return built;
}

}  // namespace acc::jit
