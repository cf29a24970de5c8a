#include "kernels/jit/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "csrc/base/check.h"

namespace acc::jit {

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() { close(); }

int Descriptor::release() { return std::exchange(fd_, -1); }

bool Descriptor::close() {
  const int fd = release();
  return fd < 0 || ::close(fd) == 0;
}

std::string error_text(int error) { return std::generic_category().message(error); }

bool read_all(int fd, std::string& content) {
  struct stat status;
  if (fstat(fd, &status) != 0) return false;
  content.resize(static_cast<size_t>(status.st_size));
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t n = pread(fd, content.data() + done, content.size() - done, done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    if (n == 0) break;  // it became shorter
    done += static_cast<size_t>(n);
  }
  content.resize(done);
  return true;
}

bool read_file(const std::string& path, std::string& content) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  return file && read_all(file.get(), content);
}

bool write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t n = write(fd, content.data(), content.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    content.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool write_file(const std::string& path, std::string_view content) {
  Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  return file && write_all(file.get(), content) && file.close();
}

namespace {

// A directory can be made on a disk that is full.
bool has_room(const std::string& directory, uint64_t bytes) {
  struct statvfs status;
  if (statvfs(directory.c_str(), &status) != 0) return false;
  return status.f_bavail >= bytes / std::max<uint64_t>(status.f_frsize, 1);
}

}  // namespace

bool Workspace::make_below(const std::string& parent) {
  std::string path = parent + "/torchacc-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) return false;
  parent_ = parent;
  path_ = std::move(path);
  return true;
}

Workspace::Workspace(const std::vector<std::string>& parents, uint64_t room) {
  for (const std::string& parent : parents) {
    if (has_room(parent, room) && make_below(parent)) return;
  }
  std::string tried;
  for (const std::string& parent : parents) {
    if (make_below(parent)) return;
    tried += base::concat(tried.empty() ? "" : "; ", parent, ": ", error_text(errno));
  }
  ACC_FAIL("[jit] no temporary directory to compile in (", tried,
           "). Make room there, or set TMPDIR to a directory that can be written.");
}

Workspace::~Workspace() {
  // What is left in a directory for temporary files does no harm.
  if (DIR* const folder = opendir(path_.c_str())) {
    while (const dirent* const entry = readdir(folder)) unlinkat(dirfd(folder), entry->d_name, 0);
    closedir(folder);
  }
  rmdir(path_.c_str());
}

bool is_private(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace acc::jit
