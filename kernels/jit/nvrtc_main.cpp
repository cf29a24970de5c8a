// The program acc_nvrtc: CUDA C++ becomes a cubin.
//
//   acc_nvrtc LIBRARY --version                          prints NVRTC's version
//   acc_nvrtc LIBRARY SOURCE RESULT OPTION...            compiles; 1 and the log when it fails
//
// LIBRARY is NVRTC. It is loaded, not linked: this program is built without CUDA. The declarations
// are those of NVIDIA's documented C interface.
#include <dlfcn.h>
#include <sys/stat.h>

#include <cstddef>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0;
using Program = void*;

class Nvrtc {
 public:
  explicit Nvrtc(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) throw std::runtime_error(dlerror());
  }

  template <class... Parameters, class... Arguments>
  int call(const char* name, int (*)(Parameters...), Arguments... arguments) const {
    const auto function = reinterpret_cast<int (*)(Parameters...)>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(dlerror());
    return function(arguments...);
  }

  // Which build of a version it is: the file's name and size.
  std::string file() const {
    Dl_info info{};
    struct stat status{};
    if (dladdr(dlsym(library_, "nvrtcVersion"), &info) == 0) return "";
    if (stat(info.dli_fname, &status) != 0) return "";
    return std::string(info.dli_fname) + ", " + std::to_string(status.st_size) + " bytes";
  }

 private:
  void* library_;
};

// The types of NVRTC's functions.
using Version = int (*)(int*, int*);
using Create = int (*)(Program*, const char*, const char*, int, const char* const*,
                       const char* const*);
using Compile = int (*)(Program, int, const char* const*);
using Size = int (*)(Program, size_t*);
using Text = int (*)(Program, char*);

std::string text_of(const Nvrtc& nvrtc, Program program, const char* size, const char* text) {
  size_t bytes = 0;
  if (nvrtc.call(size, Size(), program, &bytes) != kSuccess) return "";
  std::string result(bytes, '\0');
  if (nvrtc.call(text, Text(), program, result.data()) != kSuccess) return "";
  return result;
}

int compile(const Nvrtc& nvrtc, const std::string& source, const std::string& result,
            const std::vector<const char*>& options) {
  std::ifstream file(source, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::runtime_error(source + " cannot be read");
  Program program = nullptr;
  int status = nvrtc.call("nvrtcCreateProgram", Create(), &program, text.c_str(), "kernels.cu", 0,
                          nullptr, nullptr);
  if (status == kSuccess) {
    status = nvrtc.call("nvrtcCompileProgram", Compile(), program, static_cast<int>(options.size()),
                        options.data());
  }
  std::string log = text_of(nvrtc, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
  while (log.ends_with('\0')) log.pop_back();
  if (status != kSuccess) std::cerr << "NVRTC's error " << status << "\n";
  std::cerr << log;  // warnings, too
  if (status != kSuccess) return 1;
  std::ofstream out(result, std::ios::binary);
  out << text_of(nvrtc, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN");
  out.close();
  if (!out) throw std::runtime_error(result + " cannot be written");
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::vector<const char*> words(arguments + 1, arguments + count);
    if (words.size() == 2 && words[1] == std::string("--version")) {
      int major = 0;
      int minor = 0;
      const Nvrtc nvrtc(words[0]);
      nvrtc.call("nvrtcVersion", Version(), &major, &minor);
      std::cout << "NVRTC " << major << "." << minor << ", " << nvrtc.file() << "\n";
      return 0;
    }
    if (words.size() < 3) throw std::runtime_error("acc_nvrtc LIBRARY SOURCE RESULT OPTION...");
    return compile(Nvrtc(words[0]), words[1], words[2], {words.begin() + 3, words.end()});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
