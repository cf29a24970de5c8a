// Kernels of GPUs on the host, for the executor: what `_C.emulate_gpu` loads.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "csrc/base/check.h"
#include "kernels/codegen/render.h"
#include "kernels/device/device_kernels.h"
#include "kernels/jit/files.h"
#include "kernels/jit/toolchain.h"
#include "tests/cuda_emulator/emulator.h"

namespace acc::testing {
namespace {

// A kernel of a library that the host's compiler made of text for a GPU.
struct Function {
  emulator::Kernel kernel;
  emulator::Emulated* device;
  long* shared;
};

class EmulatedToolchain final : public jit::Toolchain {
 public:
  EmulatedToolchain() {
    ACC_CHECK(jit::read_file(ACC_EMULATED_DEVICE, device_), "no ", ACC_EMULATED_DEVICE);
  }

  std::string name() const override { return "emulated"; }
  size_t most_together() const override { return 16; }
  jit::Compiler find(const jit::Settings& settings) const override {
    return jit::find_compiler(settings);
  }
  std::string version(const jit::Compiler& compiler, const jit::Settings& settings) const override {
    return jit::compiler_version(compiler, {}, settings);
  }
  std::string options() const override { return device_; }
  jit::Built build(const jit::Compiler& compiler, const jit::Settings& settings,
                   const jit::Workspace& workspace, std::string_view text) const override {
    jit::Built built =
        jit::files_for(workspace, "kernels.cpp", "kernels.so", base::concat(device_, text));
    const jit::Outcome outcome =
        jit::run_compiler(compiler,
                          {"-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off",
                           "-fvisibility=hidden", "-w", "-nostdinc++", built.source, "-o",
                           built.path, "-nostdlib", "-lm", "-lgcc"},
                          settings, &workspace);
    if (!outcome.success) jit::compiler_failed(compiler, outcome.problem, outcome.output);
    jit::take_result(compiler, outcome, built);
    return built;
  }

  // Under names of its own: the loader would take those that this library's jit::load_library makes
  // up for the ones of the module's.
  void* load(int fd, std::string& problem) const override {
    std::string bytes;
    if (jit::read_all(fd, bytes)) return load(bytes, problem);
    problem = "unreadable";
    return nullptr;
  }
  void* load(std::string_view bytes, std::string& problem) const override {
    std::string path = "/tmp/acc-emulated-XXXXXX";
    const jit::Descriptor file(mkstemp(path.data()));
    if (!file || !jit::write_all(file.get(), bytes)) {
      problem = "no temporary file";
      return nullptr;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) problem = dlerror();
    unlink(path.c_str());
    return library;
  }
  void* find_function(void* library, const std::string& name) const override {
    const auto find = [&](const char* symbol) { return dlsym(library, symbol); };
    void* kernel = find(name.c_str());
    if (kernel == nullptr) return nullptr;
    return new Function{reinterpret_cast<emulator::Kernel>(kernel),
                        reinterpret_cast<emulator::Emulated* (*)()>(find("acc_emulated"))(),
                        reinterpret_cast<long* (*)()>(find("acc_shared"))()};
  }

 private:
  std::string device_;
};

class EmulatedDevice final : public device::DeviceKernels {
 public:
  const jit::Toolchain& toolchain() const override { return toolchain_; }
  int64_t multiprocessors() const override { return 2; }
  void prepare(void*) const override {}
  void launch(void* function, const codegen::CudaLaunch& launch, const int64_t* table, int calls,
              int stage) const override {
    static std::mutex mutex;
    static bool backwards = false;  // in turn: what depends on an order is seen
    const std::lock_guard lock(mutex);
    backwards = !backwards;
    const auto& kernel = *static_cast<const Function*>(function);
    emulator::run(kernel.kernel, kernel.device, kernel.shared, launch, table, calls, stage,
                  backwards);
  }

 private:
  const EmulatedToolchain toolchain_;
};

}  // namespace
}  // namespace acc::testing

extern "C" __attribute__((visibility("default"))) const acc::device::DeviceKernels*
acc_emulated_kernels() {
  static const auto& device = *new acc::testing::EmulatedDevice;
  return &device;
}
