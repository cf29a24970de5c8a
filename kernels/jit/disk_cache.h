#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/hash.h"
#include "kernels/jit/files.h"
#include "kernels/jit/toolchain.h"

// Compiled kernels of all of a user's processes, in one directory.
//
// A library (a cubin, for a GPU) is one file with a name (a hard link) for each kernel in it:
// `<key>.so`, where the key stands for everything that decides what the kernel is. Behind the
// library comes a footer with its length and checksum. Files are complete before they get such a
// name and never change; what is wrong with one is found when it is read, and the file is removed.
// So there is nothing to repair, and processes need no agreement: locks only spare double work.
namespace acc::jit {

class DiskCache {
 public:
  // The format of the files; a part of every key, so that versions that differ keep apart.
  static constexpr uint64_t kFormat = 1;

  enum class Missing { Create, Accept };

  // Opens the directory, which is made with `Create`. A directory that is not the user's alone is
  // refused.
  explicit DiskCache(const std::string& directory, Missing missing = Missing::Create);

  // Whether there is a directory to use. If not, nothing is found and nothing is kept.
  explicit operator bool() const { return static_cast<bool>(directory_); }
  // Why the directory was refused, or what went wrong with it last; "" when all is well.
  const std::string& problem() const { return problem_; }

  // The function `name` of the library kept under `key`, loaded; null when there is none.
  void* find(const base::Hash128& key, const std::string& name, const Toolchain& toolchain);

  // Keeps a library under each of the keys. False, with a problem, when the disk did not take it.
  bool publish(std::string_view library, const std::vector<base::Hash128>& keys);

  // Removes the libraries used longest ago when all together exceed `max_bytes`, down to three
  // quarters of that, and what interrupted processes left behind.
  void trim(uint64_t max_bytes);
  // Removes everything that is ours. A process that is about to keep a library starts over.
  void clear();

  struct Usage {
    uint64_t files = 0;  // libraries, not names
    uint64_t bytes = 0;
  };
  Usage usage() const;

  // Held by the one process that compiles what others want as well. It ends with the process.
  class Lock {
   public:
    Lock() = default;
    Lock(Lock&& other) noexcept;
    Lock& operator=(Lock&&) = delete;
    ~Lock();
    // Whether another process had it: what is wanted may be there now.
    bool waited() const { return waited_; }

   private:
    friend class DiskCache;
    const DiskCache* cache_ = nullptr;
    std::string name_;
    Descriptor file_;
    bool waited_ = false;
  };
  // Waits for the lock of that key, at most that long: not getting it is no error.
  Lock lock(const base::Hash128& key, std::chrono::milliseconds limit) const;

 private:
  struct File {
    std::string name;
    bool holds_kernels = false;           // or is something temporary
    std::pair<uint64_t, uint64_t> inode;  // device, number
    uint64_t bytes = 0;
    int64_t used_s = 0;  // when it was used last
    int64_t used_ns = 0;
  };
  std::string open_directory(Missing missing);  // why it is refused, or ""
  std::vector<File> files() const;
  void* load(const std::string& file, const Toolchain& toolchain);
  bool make_temporary(std::string_view library, std::string& name) const;
  void remove(const std::string& file) const;

  std::string path_;
  Descriptor directory_;
  std::string problem_;
  // What this object loaded: the kernels of one library are looked for one by one.
  std::map<std::pair<uint64_t, uint64_t>, void*> loaded_;
};

}  // namespace acc::jit
