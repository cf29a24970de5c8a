#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Descriptors, whole files and temporary directories.
namespace acc::jit {

// An open file, closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release();
  // Closes now. False (and errno) when the file system reports only here that a write failed.
  bool close();

 private:
  int fd_ = -1;
};

// What a system error number means, in words.
std::string error_text(int error);

// The content of a file from its beginning to its end; false and errno when it cannot be read.
bool read_all(int fd, std::string& content);
bool read_file(const std::string& path, std::string& content);

// Writes all of it; false and errno when it cannot be written.
bool write_all(int fd, std::string_view content);
// Makes a new file that only the user may read. It must not exist.
bool write_file(const std::string& path, std::string_view content);

// A directory of this process alone, removed at the end with what is in it.
class Workspace {
 public:
  // What the text and the temporary files of a compiler may take.
  static constexpr uint64_t kRoom = 16 << 20;

  // Below the first of `parents` with so many bytes of room, or the first where one can be made;
  // throws base::Error when there is none.
  explicit Workspace(const std::vector<std::string>& parents, uint64_t room = kRoom);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  const std::string& path() const { return path_; }
  const std::string& parent() const { return parent_; }

 private:
  bool make_below(const std::string& parent);

  std::string parent_;
  std::string path_;
};

// Whether a file or directory is the user's own and nobody else may write to it.
bool is_private(const struct stat& status);

}  // namespace acc::jit
