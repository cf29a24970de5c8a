#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace acc::testing {

// Memory between two pages that nobody may touch, one of which is right behind its last byte, or
// before its first: a read beyond it is seen, even one whose value nobody needs.
class Guarded {
 public:
  enum class Page { kBehind, kBefore };
  static constexpr size_t kAnywhere = ~size_t{0};
  static constexpr size_t kWord = 16;  // bytes that a kernel reads at once, at most

  // `place`: bytes from a whole word to the first byte, where it matters: less than a word may then
  // be between the memory and the page.
  Guarded(std::string name, size_t bytes, Page page, size_t place = kAnywhere)
      : name_(std::move(name)), bytes_(bytes) {
    const auto one = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    room_ = (bytes + kWord + one - 1) / one * one;
    mapped_ = room_ + 2 * one;
    void* const mapping =
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(mapping);
    begin_ = mapping_ + one;
    if (mprotect(begin_, room_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    memset(begin_, kUntouched, room_);
    data_ = begin_;
    if (page == Page::kBehind) {
      data_ += room_ - bytes;
      if (place != kAnywhere) data_ -= (reinterpret_cast<uintptr_t>(data_) - place) % kWord;
    } else if (place != kAnywhere) {
      data_ += place;
    }
    all.push_back(this);
  }
  ~Guarded() {
    std::erase(all, this);
    munmap(mapping_, mapped_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }

  // Whether what is around it, on its own pages, is as it was.
  bool is_intact() const {
    const auto untouched = [](char byte) { return byte == kUntouched; };
    return std::all_of(begin_, data_, untouched) &&
           std::all_of(data_ + bytes_, begin_ + room_, untouched);
  }
  // Whether the same bytes are in both.
  bool operator==(const Guarded& other) const {
    return bytes_ == other.bytes_ && memcmp(data_, other.data_, bytes_) == 0;
  }

  // Which memory an address is beside that may not be touched.
  static std::string place_of(const void* address) {
    const auto* const at = static_cast<const char*>(address);
    for (const Guarded* each : all) {
      if (at < each->mapping_ || at >= each->mapping_ + each->mapped_) continue;
      const bool before = at < each->data_;
      const auto away = before ? each->data_ - at : at - each->data_ - each->bytes_;
      return std::to_string(away) + (before ? " bytes before " : " bytes behind ") + each->name_ +
             ", which has " + std::to_string(each->bytes_);
    }
    return "memory that is not there";
  }

 private:
  static constexpr char kUntouched = 0x55;
  static inline std::vector<const Guarded*> all;

  const std::string name_;
  const size_t bytes_;
  char* mapping_;
  size_t mapped_;
  char* begin_;  // of the pages between the two
  size_t room_;
  char* data_;
};

}  // namespace acc::testing
