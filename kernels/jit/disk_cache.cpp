#include "kernels/jit/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <mutex>
#include <set>
#include <tuple>

#include "csrc/base/check.h"
#include "kernels/jit/process.h"

namespace acc::jit {
namespace {

// --- files ------------------------------------------------------------------------------------

// Behind each library.
struct Footer {
  char magic[8] = {'a', 'c', 'c', 'k', 'e', 'r', 'n', '0' + DiskCache::kFormat};
  uint64_t bytes = 0;
  base::Hash128 checksum;
};
static_assert(sizeof(Footer) == 32);

Footer footer_of(std::string_view library) {
  base::Hasher hasher;
  hasher.add(library);
  Footer footer;
  footer.bytes = library.size();
  footer.checksum = hasher.finish();
  return footer;
}

// Whether a file is a library and the footer that belongs to it.
bool is_sound(std::string_view content) {
  if (content.size() < sizeof(Footer)) return false;
  const Footer footer = footer_of(content.substr(0, content.size() - sizeof(Footer)));
  return std::memcmp(content.data() + footer.bytes, &footer, sizeof footer) == 0;
}

// --- names ------------------------------------------------------------------------------------

constexpr std::string_view kLibrary = ".so";
constexpr std::string_view kLock = ".lock";
constexpr std::string_view kTemporary = ".tmp";
constexpr time_t kStaleSeconds = 3600;

bool is_name(std::string_view name, std::string_view ending) {
  constexpr size_t kDigits = 32;
  return name.size() == kDigits + ending.size() && name.ends_with(ending) &&
         name.find_first_not_of("0123456789abcdef") == kDigits;
}

std::string library_name(const base::Hash128& key) { return base::to_hex(key).append(kLibrary); }

// Different in each process, on each machine that shares the directory, and each time.
std::string temporary_name() {
  static std::atomic<uint64_t> names{0};
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  base::Hasher hasher;
  hasher.add(getpid());
  hasher.add(static_cast<int64_t>(now.tv_sec));
  hasher.add(static_cast<int64_t>(now.tv_nsec));
  hasher.add(names.fetch_add(1));
  return base::to_hex(hasher.finish()).append(kTemporary);
}

// --- the directory ----------------------------------------------------------------------------

// Makes the missing directories of a path; 0, or the error of the one that could not be made.
int make_directories(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
      const int error = errno;  // a parent that may be read but not written is there all the same
      struct stat status;
      if (stat(part.c_str(), &status) != 0) return error;
    }
    if (end == std::string::npos) return 0;
  }
}

std::string why_not_opened(const std::string& path, int error) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) {
    if (S_ISLNK(status.st_mode)) return "it is a symbolic link";
    if (!S_ISDIR(status.st_mode)) return "it is not a directory";
  }
  return error_text(error);
}

// --- locks over forks -------------------------------------------------------------------------

std::mutex locks_mutex;
std::set<int>& locks = *new std::set<int>;  // descriptors; never destroyed

// A lock belongs to the open file, which a child of a fork shares: closed there, it ends with us.
void guard_over_fork() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { locks_mutex.lock(); }, [] { locks_mutex.unlock(); },
                   [] {
                     for (const int fd : locks) close(fd);
                     locks.clear();
                     locks_mutex.unlock();
                   });
  });
}

}  // namespace

DiskCache::DiskCache(const std::string& directory, Missing missing) : path_(directory) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();  // it would follow a link
  if (path_.empty()) {
    problem_ =
        "[jit] compiled kernels are not kept: neither ACC_CACHE_DIR nor XDG_CACHE_HOME nor HOME "
        "is set. Set one of them.";
    return;
  }
  const std::string why = open_directory(missing);
  if (why.empty()) return;
  directory_.close();
  problem_ = base::concat("[jit] compiled kernels are not kept in the cache directory ", path_,
                          ": ", why, ". Set ACC_CACHE_DIR to a directory of your own, mode 0700.");
}

std::string DiskCache::open_directory(Missing missing) {
  if (missing == Missing::Create) {
    const int error = make_directories(path_);
    if (error != 0) return "it cannot be made: " + error_text(error);
  }
  directory_ = Descriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory_) {
    const bool accepted = errno == ENOENT && missing == Missing::Accept;
    return accepted ? "" : why_not_opened(path_, errno);
  }
  struct stat status;
  if (fstat(directory_.get(), &status) != 0) return error_text(errno);
  if (status.st_uid != geteuid()) {
    return base::concat("it belongs to user ", status.st_uid, " and this is user ", geteuid());
  }
  return is_private(status) ? "" : "its group or everybody may write to it";
}

void* DiskCache::find(const base::Hash128& key, const std::string& name,
                      const Toolchain& toolchain) {
  if (!directory_) return nullptr;
  const std::string file = library_name(key);
  void* library = load(file, toolchain);
  if (library == nullptr) return nullptr;
  void* function = toolchain.find_function(library, name);
  if (function == nullptr) remove(file);
  return function;
}

void* DiskCache::load(const std::string& file, const Toolchain& toolchain) {
  // not blocking: it might be a pipe
  const Descriptor opened(
      openat(directory_.get(), file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  // Not there, or this process has no room for it.
  if (!opened && (errno == ENOENT || errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    return nullptr;
  }
  const auto wrong = [&]() -> void* {
    remove(file);
    return nullptr;
  };
  struct stat status;
  if (!opened || fstat(opened.get(), &status) != 0) return wrong();
  if (!S_ISREG(status.st_mode) || !is_private(status)) return wrong();
  void*& library = loaded_[{status.st_dev, status.st_ino}];
  if (library == nullptr) {
    std::string content;
    if (!read_all(opened.get(), content) || !is_sound(content)) return wrong();
    std::string problem;
    // From memory, since the file may be cut short while its code is in use, or deleted by another
    // machine, which NFS takes for gone; from the file where memory may hold no code.
    library = toolchain.load(std::string_view(content).substr(0, content.size() - sizeof(Footer)),
                             problem);
    if (library == nullptr) library = toolchain.load(opened.get(), problem);
    if (library == nullptr) {
      problem_ =
          base::concat("[jit] a compiled kernel in the cache directory ", path_,
                       " cannot be loaded: ", problem, ". Set ACC_CACHE_DIR to another one.");
      return wrong();
    }
  }
  futimens(opened.get(), nullptr);  // used now; at worst it goes earlier
  return library;
}

bool DiskCache::publish(std::string_view library, const std::vector<base::Hash128>& keys) {
  if (!directory_) return false;
  const int directory = directory_.get();
  std::string temporary;
  bool kept = make_temporary(library, temporary);
  for (const base::Hash128& key : keys) {
    if (!kept) break;
    const std::string file = library_name(key);
    if (linkat(directory, temporary.c_str(), directory, file.c_str(), 0) == 0) continue;
    if (errno == EEXIST) continue;  // another process made the same
    // a file system without hard links: each name has a copy
    std::string copy;
    kept = make_temporary(library, copy) &&
           renameat(directory, copy.c_str(), directory, file.c_str()) == 0;
    if (!kept) remove(copy);
  }
  if (!kept) {
    problem_ = base::concat("[jit] compiled kernels cannot be kept in the cache directory ", path_,
                            ": ", error_text(errno),
                            ". Make room there, or set ACC_CACHE_DIR to another directory.");
  }
  remove(temporary);
  return kept;
}

bool DiskCache::make_temporary(std::string_view library, std::string& name) const {
  name = temporary_name();
  Descriptor file(openat(directory_.get(), name.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  const Footer footer = footer_of(library);
  const std::string_view end(reinterpret_cast<const char*>(&footer), sizeof footer);
  return file && write_all(file.get(), library) && write_all(file.get(), end) && file.close();
}

void DiskCache::remove(const std::string& file) const {
  const int error = errno;  // the caller may want to tell what went wrong before
  unlinkat(directory_.get(), file.c_str(), 0);
  errno = error;
}

std::vector<DiskCache::File> DiskCache::files() const {
  std::vector<File> found;
  if (!directory_) return found;
  // opened again, because reading a directory moves the position of its descriptor
  const int fd = openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* listing = fd < 0 ? nullptr : fdopendir(fd);
  if (listing == nullptr) {
    if (fd >= 0) close(fd);
    return found;
  }
  while (const dirent* entry = readdir(listing)) {
    const std::string_view name = entry->d_name;
    const bool library = is_name(name, kLibrary);
    if (!library && !is_name(name, kLock) && !is_name(name, kTemporary)) continue;
    struct stat status;
    if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    found.push_back({std::string(name),
                     library,
                     {status.st_dev, status.st_ino},
                     static_cast<uint64_t>(status.st_size),
                     status.st_mtim.tv_sec,
                     status.st_mtim.tv_nsec});
  }
  closedir(listing);
  return found;
}

void DiskCache::trim(uint64_t max_bytes) {
  std::map<std::pair<uint64_t, uint64_t>, std::vector<File>> libraries;  // by inode
  uint64_t total = 0;
  for (const File& file : files()) {
    if (!file.holds_kernels) {
      if (file.used_s + kStaleSeconds < time(nullptr)) remove(file.name);
      continue;
    }
    std::vector<File>& names = libraries[file.inode];
    if (names.empty()) total += file.bytes;
    names.push_back(file);
  }
  if (total <= max_bytes) return;

  std::vector<const std::vector<File>*> oldest_first;
  oldest_first.reserve(libraries.size());
  for (const auto& [inode, names] : libraries) oldest_first.push_back(&names);
  std::sort(oldest_first.begin(), oldest_first.end(), [](const auto* a, const auto* b) {
    const File& x = a->front();
    const File& y = b->front();
    return std::tie(x.used_s, x.used_ns) < std::tie(y.used_s, y.used_ns);
  });
  for (const std::vector<File>* names : oldest_first) {
    if (total <= max_bytes / 4 * 3) break;
    for (const File& file : *names) remove(file.name);
    total -= names->front().bytes;
  }
}

void DiskCache::clear() {
  for (const File& file : files()) remove(file.name);
}

DiskCache::Usage DiskCache::usage() const {
  Usage usage;
  std::set<std::pair<uint64_t, uint64_t>> seen;
  for (const File& file : files()) {
    if (!file.holds_kernels || !seen.insert(file.inode).second) continue;
    ++usage.files;
    usage.bytes += file.bytes;
  }
  return usage;
}

DiskCache::Lock DiskCache::lock(const base::Hash128& key, std::chrono::milliseconds limit) const {
  guard_over_fork();
  Lock lock;
  if (!directory_) return lock;
  lock.name_ = base::to_hex(key).append(kLock);
  {
    const std::lock_guard guard(locks_mutex);
    lock.file_ = Descriptor(openat(directory_.get(), lock.name_.c_str(),
                                   O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (lock.file_) locks.insert(lock.file_.get());
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  constexpr int kPollMs = 5;
  while (lock.file_ && flock(lock.file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    // a file system may know no locks
    if (errno != EWOULDBLOCK) break;
    lock.waited_ = true;
    if (std::chrono::steady_clock::now() >= deadline || processes_stopped()) return lock;
    poll(nullptr, 0, kPollMs);
  }
  lock.cache_ = this;
  return lock;
}

DiskCache::Lock::Lock(Lock&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)),
      name_(std::move(other.name_)),
      file_(std::move(other.file_)),
      waited_(other.waited_) {}

DiskCache::Lock::~Lock() {
  if (!file_) return;
  // Whoever waits for the file that goes here gets its lock all the same, and looks for what it
  // wants before anything else.
  if (cache_ != nullptr) cache_->remove(name_);
  const std::lock_guard guard(locks_mutex);
  locks.erase(file_.get());
  file_.close();
}

}  // namespace acc::jit
