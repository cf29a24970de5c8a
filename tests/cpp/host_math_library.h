#pragma once

#include <dlfcn.h>

#include <fstream>
#include <string>
#include <vector>

#include "kernels/codegen/host_math.h"
#include "tests/cpp/scratch.h"

// Compiles the text of host_math() with the compilers of this machine and loads it.
namespace acc::codegen {

using testing::have_program;
using testing::Output;
using testing::ScratchFolder;
using testing::shell;

// out[i] = f(a[i], b[i], c[i]) for `count` elements, a multiple of 16; functions with fewer
// arguments do not read the others.
using Kernel = void (*)(const float* a, const float* b, const float* c, float* out, long count);

inline int arity(const std::string& name) { return name == "fma" ? 3 : name == "pow" ? 2 : 1; }

inline std::string vector_types() {
  return R"(
#if __AVX512F__
#define W 16
#else
#define W 8
#endif
typedef float F32 __attribute__((vector_size(W * 4)));
typedef double F64 __attribute__((vector_size(W * 8)));
typedef int I32 __attribute__((vector_size(W * 4)));
typedef long I64 __attribute__((vector_size(W * 8)));
typedef unsigned U32 __attribute__((vector_size(W * 4)));
typedef float Elements __attribute__((vector_size(W * 4), aligned(4), may_alias));
)";
}

// The functions `names` and a kernel for each, called kernel_NAME.
inline std::string kernels_text(const std::vector<std::string>& names) {
  std::string text = vector_types() + host_math(names);
  for (const std::string& name : names) {
    text += "extern \"C\" __attribute__((visibility(\"default\"))) void kernel_" + name +
            "(const float* a, const float* b, const float* c, float* out, long count) {\n"
            "  for (long i = 0; i < count; i += W) *(Elements*)(out + i) = " +
            name + "_f32(*(const Elements*)(a + i)";
    if (arity(name) > 1) text += ", *(const Elements*)(b + i)";
    if (arity(name) > 2) text += ", *(const Elements*)(c + i)";
    text += ");\n}\n";
  }
  return text;
}

inline std::vector<std::string> compilers() {
  std::vector<std::string> found;
  for (const char* name : {"g++", "clang++"}) {
    if (have_program(name)) found.push_back(name);
  }
  return found;
}

// What the CPU here can run. x86-64-v2 has no fused multiply-add: the way of machines without.
inline std::vector<std::string> machine_flags() {
#if defined(__x86_64__)
  std::vector<std::string> flags = {"-march=native"};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    flags.push_back("-mavx2 -mfma");
  }
  if (__builtin_cpu_supports("sse4.2")) flags.push_back("-march=x86-64-v2");
  return flags;
#elif defined(__aarch64__)
  return {"-mcpu=native"};
#else
  return {""};
#endif
}

inline std::string compile_command(const std::string& compiler, const std::string& machine) {
  return compiler +
         " -x c++ -std=c++17 -O3 -Wall -Wextra -Werror -Wno-unused-function"
         " -Wno-unused-parameter -fno-math-errno -fno-trapping-math -ffp-contract=off -fPIC"
         " -fno-exceptions -fno-rtti -fvisibility=hidden " +
         machine;
}

// One way of compiling all functions, loaded.
class Library {
 public:
  Library(const ScratchFolder& folder, const std::string& compiler, const std::string& machine,
          const std::vector<std::string>& names)
      : what_(compiler + " " + machine) {
    std::ofstream(folder / "kernels.cpp") << kernels_text(names);
    // a path that dlopen has seen would give the library that was there before
    static int number = 0;
    const std::string file = folder / ("kernels" + std::to_string(++number) + ".so");
    const Output output = shell(compile_command(compiler, machine) + " -shared -o " + file + " " +
                                (folder / "kernels.cpp") + " -lm");
    problem_ = output.text;
    if (output.status != 0) return;
    handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) problem_ = dlerror();
  }
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(Library&& other) noexcept
      : what_(std::move(other.what_)), problem_(std::move(other.problem_)), handle_(other.handle_) {
    other.handle_ = nullptr;
  }
  Kernel kernel(const std::string& name) const {
    if (handle_ == nullptr) return nullptr;
    return reinterpret_cast<Kernel>(dlsym(handle_, ("kernel_" + name).c_str()));
  }
  const std::string& what() const { return what_; }
  const std::string& problem() const { return problem_; }

 private:
  std::string what_, problem_;
  void* handle_ = nullptr;
};

}  // namespace acc::codegen
