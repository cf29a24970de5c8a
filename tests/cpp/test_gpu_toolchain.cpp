// Kernels for GPUs: made in other processes, a few at a time. A script stands for NVRTC, which
// tests/python/test_cuda_kernels.py runs, and this process for what loads cubins.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>

#include "kernels/jit/compile.h"
#include "kernels/jit/gpu_toolchain.h"
#include "tests/cpp/jit_helpers.h"

namespace acc::jit {
namespace {

// For ever, as what a toolchain loads, and within reach of a sanitizer that looks for leaks.
template <class T>
T* keep(T* made) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<T>>;
  const std::lock_guard lock(mutex);
  return all.emplace_back(made).get();
}

// "Loads" a cubin: a kernel is in it when its name stands there.
class Loaded final : public GpuToolchain {
 public:
  using GpuToolchain::GpuToolchain;

  void* load(int fd, std::string& problem) const override {
    std::string bytes;
    return read_all(fd, bytes) ? load(bytes, problem) : nullptr;
  }
  void* load(std::string_view bytes, std::string& problem) const override {
    if (!problem_.empty()) {
      problem = problem_;
      return nullptr;
    }
    return keep(new std::string(bytes));
  }
  void* find_function(void* library, const std::string& name) const override {
    const auto& bytes = *static_cast<const std::string*>(library);
    const size_t at = bytes.find(name);
    return at == std::string::npos ? nullptr : keep(new std::string(name));
  }

  std::string problem_;
};

class GpuToolchainTest : public JitTest {
 protected:
  void SetUp() override {
    JitTest::SetUp();
    // What NVRTC writes is an ELF file for another machine; here, one with the text behind it.
    const Settings settings = Settings::read();
    const Workspace workspace({in("tmp")});
    std::string elf = build(find_compiler(settings), settings, workspace, "int x;").bytes;
    elf[18] = static_cast<char>(190);
    write_text(in("elf"), elf);
  }

  // Never destroyed, as compile() wants it.
  Loaded& toolchain(const std::string& architecture, const std::string& body) {
    write_script(in("nvrtc"),
                 "[ \"$2\" = --version ] && { echo NVRTC 13.0; exit 0; }\n"
                 "echo \"$@\" >> \"$here/arguments\"\n" +
                     body);
    return *keep(new Loaded(in("nvrtc"), "libnvrtc.so.13", architecture, {"--one", "--two"}));
  }
  Loaded& working(const std::string& architecture) {
    return toolchain(architecture, "cat \"$here/elf\" \"$2\" > \"$3\"");
  }

  // How often the script was asked to compile.
  size_t compiled() const {
    const std::string text = read_text(in("arguments"));
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  static std::vector<Source> sources(int count) {
    static int made = 0;
    std::vector<Source> found;
    for (int i = 0; i < count; ++i) {
      const std::string name =
          "gpu_kernel_" + std::to_string(getpid()) + "_" + std::to_string(++made) + "_";
      found.push_back({name, "text of " + name});
    }
    return found;
  }

  static std::shared_ptr<Job> finished(const std::vector<Source>& kernels, const Toolchain& chain) {
    std::shared_ptr<Job> job = compile("preamble\n", kernels, chain);
    job->wait();
    return job;
  }
};

TEST_F(GpuToolchainTest, AFewKernelsAreAProgram) {
  const std::vector<Source> kernels = sources(9);
  const auto job = finished(kernels, working("sm_90"));
  EXPECT_EQ(job->error(), "");
  for (const Source& kernel : kernels) {
    const void* function = job->function(kernel.name);
    ASSERT_NE(function, nullptr);
    EXPECT_EQ(*static_cast<const std::string*>(function), kernel.name);
  }
  const std::string arguments = read_text(in("arguments"));
  EXPECT_EQ(compiled(), 3U);
  EXPECT_TRUE(arguments.starts_with("libnvrtc.so.13 ")) << arguments;
  EXPECT_NE(arguments.find("kernels.cubin --gpu-architecture=sm_90 --one --two\n"),
            std::string::npos)
      << arguments;
  wait_for_threads();
  EXPECT_TRUE(listing("tmp").empty());
}

TEST_F(GpuToolchainTest, EachArchitectureHasItsOwn) {
  const std::vector<Source> kernels = sources(1);
  const Loaded& one = working("sm_80");
  const Loaded& other = working("sm_90");
  const void* function = finished(kernels, one)->function(kernels[0].name);
  EXPECT_NE(finished(kernels, other)->function(kernels[0].name), function);
  EXPECT_EQ(compiled(), 2U);
  // the same architecture, asked for anew
  EXPECT_EQ(finished(kernels, working("sm_80"))->function(kernels[0].name), function);
  EXPECT_EQ(compiled(), 2U);
}

TEST_F(GpuToolchainTest, WhatIsOnTheDiskIsNotCompiledAgain) {
  const std::vector<Source> kernels = sources(2);
  const Loaded& chain = working("sm_90");
  const auto want = [&] {
    const auto job = finished(kernels, chain);
    if (job->function(kernels[1].name) != nullptr) return 0;
    fprintf(stderr, "%s\n", job->error().c_str());
    return 1;
  };
  EXPECT_EQ(in_child(want), 0);
  EXPECT_EQ(in_child(want), 0);
  EXPECT_EQ(compiled(), 1U);
  // another version of NVRTC, other kernels
  const Loaded& later = toolchain("sm_90", "cat \"$here/elf\" \"$2\" > \"$3\"  # newer");
  EXPECT_EQ(in_child([&] {
              const auto job = finished(kernels, later);
              return job->function(kernels[1].name) != nullptr ? 0 : 1;
            }),
            0);
  EXPECT_EQ(compiled(), 2U);
}

TEST_F(GpuToolchainTest, WhatGoesWrongIsSaid) {
  const struct {
    const char* body;
    const char* words;
  } cases[] = {
      {"echo 'error: what is this' >&2; exit 1", "error: what is this"},
      {"exit 0", "succeeded without a result"},
      {"echo nothing > \"$3\"", "no whole cubin"},
      {"head -c 300 \"$here/elf\" > \"$3\"", "no whole cubin"},
      {"cat \"$here/elf\" > \"$3\"", "left out the kernel"},
  };
  for (const auto& each : cases) {
    const std::vector<Source> kernels = sources(1);
    const auto job = finished(kernels, toolchain("sm_90", each.body));
    EXPECT_EQ(job->function(kernels[0].name), nullptr);
    EXPECT_NE(job->error().find(each.words), std::string::npos) << job->error();
    EXPECT_NE(job->error().find("unfused"), std::string::npos) << job->error();
    EXPECT_EQ(job->error().find("TMPDIR"), std::string::npos) << job->error();
  }
  const std::vector<Source> kernels = sources(2);
  Loaded& chain = working("sm_90");
  chain.problem_ = "no kernel image is available";
  EXPECT_NE(finished({kernels[0]}, chain)->error().find("no kernel image"), std::string::npos);
  std::filesystem::remove(in("nvrtc"));
  EXPECT_NE(finished({kernels[1]}, chain)->error().find("Install the package again"),
            std::string::npos);
}

}  // namespace
}  // namespace acc::jit
