#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/jit/toolchain.h"

// Generated text becomes functions: from memory, from the disk, or by the compiler.
namespace acc::jit {

// One kernel. `name` is the extern "C" symbol that `text` defines with default visibility, and
// stands for the text: whoever names a kernel puts a hash of its text into the name.
struct Source {
  std::string name;
  std::string text;
};

struct Kernel;  // a function and what became of it

// Kernels on their way. Every function may be called by any thread.
class Job {
 public:
  // Whether all kernels are there or failed. Does not block.
  bool done() const;
  // Of how many kernels it is, and how many of these are there or failed.
  size_t size() const { return kernels_.size(); }
  size_t finished() const;
  // Until done. In the child of a fork that came in between, everything unfinished has failed.
  void wait() const;
  // The same, but at most so long; whether it is done.
  bool wait_for(std::chrono::milliseconds limit) const;
  // The function of that name; null before it is done, and when it could not be made.
  void* function(const std::string& name) const;
  // Why functions are missing; "" when none is, and before the job is done.
  std::string error() const;

 private:
  friend std::shared_ptr<Job> compile(std::string_view preamble, std::vector<Source> sources,
                                      const Toolchain& toolchain);
  std::unordered_map<std::string, std::shared_ptr<Kernel>> kernels_;
};

// Starts to make kernels, on a thread that ends when there is nothing more to do. What is neither
// in this process nor on the disk becomes files, `preamble` followed by the texts, as few as the
// toolchain likes, which has to live for ever; its kernels are counted as `jit/compiled`, those
// that could not be made as `jit/failed`. A kernel is made once in a process, even if that fails,
// and stays until it ends. What goes wrong is the job's error.
std::shared_ptr<Job> compile(std::string_view preamble, std::vector<Source> sources,
                             const Toolchain& toolchain = host_toolchain());

// For the end of the process, which does not wait for a compiler and leaves neither it nor its
// files behind. Happens by itself where the process ends with exit().
void stop();

// What went wrong with the disk cache last; "" when nothing did. Kernels are made all the same.
std::string cache_problem();

struct CacheInfo {
  std::string directory;
  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t max_bytes = 0;
  std::string problem;  // why the directory is not used
};
CacheInfo cache_info();

// Removes all kernels from the disk. What is loaded, by any process, stays.
void clear_cache();

}  // namespace acc::jit
