#include "kernels/jit/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "kernels/jit/files.h"

namespace acc::jit {
namespace {

// Held while a library is loaded, and over each fork: the child's loader is never half way.
std::mutex loading;

void guard_loading_over_fork() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto unlock = [] { loading.unlock(); };
    pthread_atfork([] { loading.lock(); }, unlock, unlock);
  });
}

// A path to the descriptor that was never used before. The loader knows libraries by the text of
// their paths before it looks at files, and numbers of descriptors come back: /proc/self/fd/5 would
// be whatever was loaded through 5 first. So the number of the load is spelled into the path, a
// slash for each binary 0 and a slash with a dot for each 1.
std::string fresh_path(int fd) {
  static std::atomic<uint64_t> loads{0};
  std::string path = "/proc/self/fd";
  for (uint64_t load = ++loads; load != 0; load /= 2) path += load % 2 == 0 ? "/" : "/.";
  return path + "/" + std::to_string(fd);
}

// The descriptor again, under a number that programs rarely come to. The loader tells debuggers,
// sanitizers and whoever else asks the path that a library was loaded from, and they open it long
// after: there should not be another file by then. None where the limit is lower; then the library
// is loaded all the same.
Descriptor out_of_the_way(int fd) {
  constexpr int kAboveUsual = 1000;  // and below the usual limit, 1024
  return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, kAboveUsual));
}

// Whether bytes [offset, offset + count * size) are there.
bool inside(std::string_view bytes, uint64_t offset, uint64_t count, uint64_t size) {
  if (size != 0 && count > bytes.size() / size) return false;
  return offset <= bytes.size() && count * size <= bytes.size() - offset;
}

bool is_whole(std::string_view bytes, bool (*is_kind)(const Elf64_Ehdr& header)) {
  Elf64_Ehdr header;
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return false;
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || !is_kind(header)) return false;
  if (header.e_phnum == 0 || header.e_phentsize != sizeof(Elf64_Phdr)) return false;
  // linkers write the sections' table last
  if (!inside(bytes, header.e_phoff, header.e_phnum, header.e_phentsize)) return false;
  if (!inside(bytes, header.e_shoff, header.e_shnum, header.e_shentsize)) return false;
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, bytes.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (!inside(bytes, segment.p_offset, 1, segment.p_filesz)) return false;
  }
  return true;
}

}  // namespace

bool is_whole_library(std::string_view bytes) {
  return is_whole(bytes, [](const Elf64_Ehdr& header) { return header.e_type == ET_DYN; });
}

bool is_whole_cubin(std::string_view bytes) {
  return is_whole(bytes, [](const Elf64_Ehdr& header) { return header.e_machine == EM_CUDA; });
}

void* load_library(int fd, std::string& problem) {
  guard_loading_over_fork();
  const std::lock_guard lock(loading);
  const Descriptor away = out_of_the_way(fd);
  void* library = dlopen(fresh_path(away ? away.get() : fd).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    problem = text != nullptr ? text : "the loader gave no reason";
  }
  return library;
}

void* load_library(std::string_view bytes, std::string& problem) {
  const Descriptor memory(memfd_create("torchacc-kernels", MFD_CLOEXEC));
  if (!memory || !write_all(memory.get(), bytes)) {
    problem = "memfd_create: " + error_text(errno);
    return nullptr;
  }
  return load_library(memory.get(), problem);
}

void* find_function(void* library, const std::string& name) { return dlsym(library, name.c_str()); }

}  // namespace acc::jit
