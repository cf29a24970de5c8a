#include <link.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include <cerrno>
#include <cstddef>
#include <set>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"
#include "kernels/jit/compiler.h"
#include "kernels/jit/disk_cache.h"
#include "kernels/jit/library.h"
#include "tests/cpp/jit_helpers.h"

namespace acc::jit {
namespace {

using base::Hash128;
using std::chrono::milliseconds;

constexpr milliseconds kSoon{50};
constexpr milliseconds kLong{60'000};

class DiskCacheTest : public JitTest {
 protected:
  // A library with `int name() { return value; }`.
  std::string library(const std::string& name, int value) {
    const Settings settings = Settings::read();
    const Workspace workspace({in("tmp")});
    return build(find_compiler(settings), settings, workspace,
                 "extern \"C\" __attribute__((visibility(\"default\"))) int " + name +
                     "() { return " + std::to_string(value) + "; }\n")
        .bytes;
  }

  std::string path_of(const Hash128& key) const { return in("cache/" + to_hex(key) + ".so"); }

  // Opens the cache anew, as another process would.
  void* find(const Hash128& key, const std::string& name) {
    return DiskCache(in("cache")).find(key, name, host_toolchain());
  }

  static int call(void* function) {
    return function == nullptr ? -1 : reinterpret_cast<int (*)()>(function)();
  }

  // Publishes a library under `key`, lets `harm` do something to its file, and expects that it is
  // neither found nor left there, and that it can be published again.
  template <class Harm>
  void expect_removed(const Harm& harm) {
    const std::string bytes = library("f", 7);
    ASSERT_TRUE(DiskCache(in("cache")).publish(bytes, {kKey}));
    harm(path_of(kKey));
    EXPECT_EQ(find(kKey, "f"), nullptr);
    EXPECT_FALSE(std::filesystem::exists(std::filesystem::symlink_status(path_of(kKey))));
    ASSERT_TRUE(DiskCache(in("cache")).publish(bytes, {kKey}));
    EXPECT_EQ(call(find(kKey, "f")), 7);
  }

  static std::string why_refused(const std::string& directory) {
    const DiskCache cache(directory);
    EXPECT_FALSE(static_cast<bool>(cache));
    return cache.problem();
  }

  static constexpr Hash128 kKey{1, 2};
};

void set_age(const std::string& path, int seconds) {
  timespec times[2];
  clock_gettime(CLOCK_REALTIME, &times[0]);
  times[0].tv_sec -= seconds;
  times[1] = times[0];
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
}

// --- libraries ----------------------------------------------------------------------------------

TEST_F(DiskCacheTest, OneFileIsFoundUnderEachOfItsKeys) {
  DiskCache cache(in("cache"));
  EXPECT_EQ(cache.find({1, 1}, "f", host_toolchain()), nullptr);
  ASSERT_TRUE(cache.publish(library("f", 5), {{1, 1}, {1, 2}, {1, 3}}));
  for (uint64_t i = 1; i <= 3; ++i) EXPECT_EQ(call(find({1, i}, "f")), 5);
  EXPECT_EQ(find({1, 4}, "f"), nullptr);
  EXPECT_EQ(cache.usage().files, 1u);
  EXPECT_EQ(cache.usage().bytes, std::filesystem::file_size(path_of({1, 1})));
  EXPECT_EQ(std::filesystem::hard_link_count(path_of({1, 1})), 3u);  // and no temporary name
  EXPECT_EQ(cache.problem(), "");
}

// As it does on a disk of the network that another machine clears.
TEST_F(DiskCacheTest, WhatIsInUseOutlivesItsFile) {
  ASSERT_TRUE(DiskCache(in("cache")).publish(library("f", 6), {kKey}));
  void* const function = find(kKey, "f");
  std::filesystem::resize_file(path_of(kKey), 0);
  EXPECT_EQ(call(function), 6);
}

TEST_F(DiskCacheTest, CompilersWorkWhereThereIsRoom) {
  // File systems of their own, with less and more room.
  std::error_code none;
  const auto free = [&](const std::string& path) {
    return std::filesystem::space(path, none).available;
  };
  std::vector<std::string> parents{in("tmp"), "/dev/shm"};
  if (free(parents[0]) > free(parents[1])) std::swap(parents[0], parents[1]);
  const uint64_t difference = free(parents[1]) - free(parents[0]);
  if (none || difference < free(parents[1]) / 8) GTEST_SKIP() << "they have as much room";
  const uint64_t between = free(parents[0]) + difference / 2;
  EXPECT_EQ(Workspace(parents, 1).parent(), parents[0]);
  EXPECT_EQ(Workspace(parents, between).parent(), parents[1]);
  EXPECT_EQ(Workspace({in("none"), parents[0]}, between).parent(), parents[0]);
  EXPECT_THROW(Workspace({in("none")}), base::Error);
}

// The loader takes a path it has seen for the library it has seen there.
TEST_F(DiskCacheTest, LibrariesThatAreReadThroughTheSameDescriptorAreKeptApart) {
  DiskCache cache(in("cache"));
  for (uint64_t i = 1; i <= 5; ++i) {
    ASSERT_TRUE(cache.publish(library("f", static_cast<int>(i)), {{i, 0}}));
  }
  for (uint64_t i = 1; i <= 5; ++i) EXPECT_EQ(call(find({i, 0}, "f")), static_cast<int>(i));
}

TEST_F(DiskCacheTest, ALibraryIsLoadedFromMemoryToo) {
  std::string problem;
  void* const loaded = load_library(library("f", 11), problem);
  ASSERT_NE(loaded, nullptr) << problem;
  EXPECT_EQ(call(find_function(loaded, "f")), 11);
  EXPECT_EQ(find_function(loaded, "g"), nullptr);
  EXPECT_EQ(load_library("no library", problem), nullptr);
  EXPECT_NE(problem, "");
}

// Debuggers and sanitizers open the files that the loader names, long after.
TEST_F(DiskCacheTest, TheLoaderNamesNoFileThatIsAnother) {
  std::string problem;
  ASSERT_NE(load_library(library("f", 12), problem), nullptr) << problem;
  std::vector<Descriptor> others;  // what the program opens next
  for (int i = 0; i < 20; ++i) others.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<std::string> names;
  const auto add = [](dl_phdr_info* info, size_t, void* to) {
    static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(add, &names);
  std::erase_if(names, [](const std::string& name) { return !name.starts_with("/proc/self/fd/"); });
  EXPECT_FALSE(names.empty());
  for (const std::string& name : names) EXPECT_NE(access(name.c_str(), F_OK), 0) << name;
}

TEST_F(DiskCacheTest, EveryCutOfALibraryIsNoticed) {
  const std::string bytes = library("f", 1);
  EXPECT_TRUE(is_whole_library(bytes));
  for (size_t size = 0; size < bytes.size(); size += 37) {
    ASSERT_FALSE(is_whole_library(std::string_view(bytes).substr(0, size))) << size;
  }
  EXPECT_FALSE(is_whole_library(std::string_view(bytes).substr(0, bytes.size() - 1)));
  EXPECT_FALSE(is_whole_library(std::string(bytes.size(), 'x')));
}

TEST_F(DiskCacheTest, AnExistingKeyKeepsItsLibrary) {
  DiskCache cache(in("cache"));
  ASSERT_TRUE(cache.publish(library("f", 1), {kKey}));
  ASSERT_TRUE(cache.publish(library("f", 2), {kKey, {3, 4}}));
  EXPECT_EQ(call(find(kKey, "f")), 1);
  EXPECT_EQ(call(find({3, 4}, "f")), 2);
}

// --- files that are wrong -----------------------------------------------------------------------

TEST_F(DiskCacheTest, ATruncatedFileIsRemoved) {
  expect_removed([](const std::string& path) {
    std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  });
}

TEST_F(DiskCacheTest, AnEmptyFileIsRemoved) {
  expect_removed([](const std::string& path) { std::filesystem::resize_file(path, 0); });
}

TEST_F(DiskCacheTest, AFileWithOneWrongBitIsRemoved) {
  for (const double place : {0.0, 0.1, 0.5, 0.99, 1.0}) {
    expect_removed([place](const std::string& path) {
      std::string content = read_text(path);
      content[static_cast<size_t>(place * static_cast<double>(content.size() - 1))] ^= 4;
      write_text(path, content);
    });
  }
}

TEST_F(DiskCacheTest, AFileThatGrewIsRemoved) {
  expect_removed([](const std::string& path) { write_text(path, read_text(path) + "x"); });
}

TEST_F(DiskCacheTest, AForeignFileIsRemoved) {
  expect_removed([](const std::string& path) { write_text(path, "#!/bin/sh\necho hello\n"); });
}

TEST_F(DiskCacheTest, ALibraryWithoutFooterIsRemoved) {
  const std::string bytes = library("f", 9);
  expect_removed([&bytes](const std::string& path) { write_text(path, bytes); });
}

TEST_F(DiskCacheTest, ALibraryWithoutTheFunctionIsRemoved) {
  DiskCache cache(in("cache"));
  ASSERT_TRUE(cache.publish(library("g", 1), {kKey}));
  EXPECT_EQ(cache.find(kKey, "f", host_toolchain()), nullptr);
  EXPECT_FALSE(std::filesystem::exists(path_of(kKey)));
}

TEST_F(DiskCacheTest, AFileThatHoldsNoLibraryIsRemovedThoughItsChecksumIsRight) {
  DiskCache cache(in("cache"));
  ASSERT_TRUE(cache.publish("sound, and no library", {kKey}));
  EXPECT_EQ(cache.find(kKey, "f", host_toolchain()), nullptr);
  EXPECT_NE(cache.problem(), "");
  EXPECT_FALSE(std::filesystem::exists(path_of(kKey)));
}

TEST_F(DiskCacheTest, ASymbolicLinkIsRemovedAndNotFollowed) {
  expect_removed([this](const std::string& path) {
    std::filesystem::rename(path, in("elsewhere"));
    std::filesystem::create_symlink(in("elsewhere"), path);
  });
  EXPECT_TRUE(std::filesystem::exists(in("elsewhere")));
}

TEST_F(DiskCacheTest, APipeIsRemovedAndNotWaitedFor) {
  expect_removed([](const std::string& path) {
    std::filesystem::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  });
}

TEST_F(DiskCacheTest, AFileThatOthersMayWriteIsRemoved) {
  for (const mode_t mode : {0620, 0602}) {
    expect_removed([mode](const std::string& path) { ASSERT_EQ(chmod(path.c_str(), mode), 0); });
  }
}

TEST_F(DiskCacheTest, AFileOfSomebodyElseIsRemoved) {
  if (!is_root()) GTEST_SKIP() << "only root can give a file away";
  expect_removed([](const std::string& path) { ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0); });
}

TEST_F(DiskCacheTest, ADirectoryInTheWayIsAMiss) {
  DiskCache cache(in("cache"));
  std::filesystem::create_directory(path_of(kKey));
  EXPECT_EQ(cache.find(kKey, "f", host_toolchain()), nullptr);
  cache.publish(library("f", 3), {kKey, {5, 5}});
  EXPECT_EQ(cache.find(kKey, "f", host_toolchain()), nullptr);
  EXPECT_EQ(call(cache.find({5, 5}, "f", host_toolchain())), 3);
}

// --- the directory ------------------------------------------------------------------------------

TEST_F(DiskCacheTest, DirectoriesAndFilesAreMadeForTheUserAlone) {
  const mode_t before = umask(0);
  DiskCache cache(in("a/b/cache"));
  const bool published = cache.publish(library("f", 1), {kKey});
  umask(before);
  ASSERT_TRUE(published) << cache.problem();
  using std::filesystem::perms;
  for (const char* name : {"a", "a/b", "a/b/cache"}) {
    EXPECT_EQ(std::filesystem::status(in(name)).permissions(), perms::owner_all) << name;
  }
  EXPECT_EQ(std::filesystem::status(in("a/b/cache/" + to_hex(kKey) + ".so")).permissions(),
            perms::owner_read | perms::owner_write);
}

TEST_F(DiskCacheTest, ADirectoryThatOthersMayWriteIsRefused) {
  for (const mode_t mode : {0770, 0707, 0777}) {
    std::filesystem::create_directory(in("open"));
    ASSERT_EQ(chmod(in("open").c_str(), mode), 0);
    EXPECT_NE(why_refused(in("open")).find("may write"), std::string::npos) << mode;
  }
  ASSERT_EQ(chmod(in("open").c_str(), 0755), 0);
  EXPECT_TRUE(static_cast<bool>(DiskCache(in("open"))));
}

TEST_F(DiskCacheTest, ADirectoryOfSomebodyElseIsRefused) {
  if (is_root()) {
    std::filesystem::create_directory(in("other"));
    ASSERT_EQ(chown(in("other").c_str(), 65534, 65534), 0);
    EXPECT_NE(why_refused(in("other")).find("belongs to user 65534"), std::string::npos);
  } else {
    EXPECT_NE(why_refused("/").find("belongs to user 0"), std::string::npos);
  }
}

TEST_F(DiskCacheTest, ASymbolicLinkIsRefused) {
  std::filesystem::create_directory(in("real"));
  std::filesystem::create_symlink(in("real"), in("link"));
  EXPECT_NE(why_refused(in("link")).find("symbolic link"), std::string::npos);
  EXPECT_NE(why_refused(in("link") + "//").find("symbolic link"), std::string::npos);
}

TEST_F(DiskCacheTest, WhatIsNoDirectoryIsRefused) {
  write_text(in("file"), "x");
  EXPECT_NE(why_refused(in("file")).find("not a directory"), std::string::npos);
  EXPECT_NE(why_refused(in("file/below")).find("cannot be made"), std::string::npos);
  EXPECT_NE(why_refused("").find("HOME"), std::string::npos);
}

TEST_F(DiskCacheTest, ARefusedDirectoryFindsAndKeepsNothing) {
  write_text(in("file"), "x");
  DiskCache cache(in("file"));
  EXPECT_FALSE(cache.publish(library("f", 1), {kKey}));
  EXPECT_EQ(cache.find(kKey, "f", host_toolchain()), nullptr);
  cache.trim(0);
  cache.clear();
  EXPECT_EQ(cache.usage().files, 0u);
  EXPECT_FALSE(cache.lock(kKey, kSoon).waited());
  EXPECT_EQ(read_text(in("file")), "x");
}

TEST_F(DiskCacheTest, LookingMakesNoDirectory) {
  const DiskCache cache(in("cache"), DiskCache::Missing::Accept);
  EXPECT_FALSE(static_cast<bool>(cache));
  EXPECT_EQ(cache.problem(), "");
  EXPECT_FALSE(std::filesystem::exists(in("cache")));
}

TEST_F(DiskCacheTest, AFullDiskKeepsNothingAndSaysWhy) {
  const std::string bytes = library("f", 1);
  const int status = in_child([&] {
    // what a write gets that does not fit, for root as well
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    DiskCache cache(in("cache"));
    if (cache.publish(bytes, {kKey})) return 2;
    return cache.problem().find(error_text(EFBIG)) != std::string::npos ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

// Lets the next calls of `number` fail with `error`, in this process and for good.
bool forbid(int number, int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(filter), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_F(DiskCacheTest, WithoutHardLinksEachKeyHasACopy) {
  const std::string bytes = library("f", 6);
  const int status = in_child([&] {
    if (!forbid(SYS_linkat, EPERM)) return 1;
    return DiskCache(in("cache")).publish(bytes, {{1, 1}, {1, 2}}) ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(listing("cache").size(), 2u);
  EXPECT_EQ(std::filesystem::hard_link_count(path_of({1, 1})), 1u);
  EXPECT_EQ(call(find({1, 1}, "f")), 6);
  EXPECT_EQ(call(find({1, 2}, "f")), 6);
}

// --- size ---------------------------------------------------------------------------------------

TEST_F(DiskCacheTest, TheLibrariesUsedLongestAgoGoFirst) {
  DiskCache cache(in("cache"));
  const std::string bytes = library("f", 1);
  constexpr uint64_t kCount = 8;
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(cache.publish(bytes, {{i, 0}, {i, 1}}));  // two names, one file
    set_age(path_of({i, 0}), static_cast<int>(1000 - 10 * i));
  }
  ASSERT_NE(find({0, 0}, "f"), nullptr);  // the oldest is now the youngest
  const uint64_t each = std::filesystem::file_size(path_of({0, 0}));
  EXPECT_EQ(cache.usage().bytes, kCount * each);

  cache.trim(kCount * each);
  EXPECT_EQ(cache.usage().files, kCount);  // not above the limit
  cache.trim(kCount * each - 1);
  EXPECT_EQ(cache.usage().files, kCount * 3 / 4 - 1);
  for (uint64_t i = 0; i < kCount; ++i) {
    const bool stays = i == 0 || i >= 4;
    EXPECT_EQ(std::filesystem::exists(path_of({i, 0})), stays) << i;
    EXPECT_EQ(std::filesystem::exists(path_of({i, 1})), stays) << i;
  }
  cache.trim(0);
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(DiskCacheTest, WhatInterruptedProcessesLeftGoesAfterAnHour) {
  DiskCache cache(in("cache"));
  const std::string digits = to_hex(kKey);
  for (const char* ending : {".tmp", ".lock"}) write_text(in("cache/" + digits + ending), "x");
  cache.trim(1 << 20);
  EXPECT_EQ(listing("cache").size(), 2u);
  for (const char* ending : {".tmp", ".lock"}) set_age(in("cache/" + digits + ending), 3700);
  cache.trim(1 << 20);
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(DiskCacheTest, ClearRemovesWhatIsOursAndNothingElse) {
  DiskCache cache(in("cache"));
  ASSERT_TRUE(cache.publish(library("f", 1), {{1, 1}, {1, 2}}));
  void* const loaded = cache.find({1, 1}, "f", host_toolchain());
  const std::vector<std::string> foreign{"notes.txt", "library.so", to_hex(kKey) + ".so.bak"};
  for (const std::string& name : foreign) write_text(in("cache/" + name), "x");
  set_age(in("cache/library.so"), 100'000);
  cache.trim(0);
  cache.clear();
  const std::vector<std::string> left = listing("cache");
  EXPECT_EQ(std::set<std::string>(left.begin(), left.end()),
            std::set<std::string>(foreign.begin(), foreign.end()));
  EXPECT_EQ(call(loaded), 1);
}

// --- locks --------------------------------------------------------------------------------------

TEST_F(DiskCacheTest, ALockIsForOne) {
  DiskCache cache(in("cache"));
  std::optional<DiskCache::Lock> first(cache.lock(kKey, kLong));
  EXPECT_FALSE(first->waited());
  EXPECT_TRUE(cache.lock(kKey, kSoon).waited());
  EXPECT_FALSE(cache.lock({7, 7}, kSoon).waited());  // another one
  std::thread other([&] { EXPECT_TRUE(cache.lock(kKey, kLong).waited()); });
  std::this_thread::sleep_for(kSoon);
  first.reset();
  other.join();
  EXPECT_FALSE(cache.lock(kKey, kSoon).waited());
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(DiskCacheTest, AHolderThatDiesFreesTheLock) {
  DiskCache cache(in("cache"));
  const int status = in_child([&] {
    const DiskCache::Lock lock = cache.lock(kKey, kLong);
    return lock.waited() ? 1 : (raise(SIGKILL), 2);
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_FALSE(cache.lock(kKey, kSoon).waited());
}

// A child shares the open file, and would hold the lock for as long as it lives.
TEST_F(DiskCacheTest, AChildOfAForkHoldsNoLock) {
  DiskCache cache(in("cache"));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  pid_t grandchild = 0;
  const int status = in_child([&] {
    const DiskCache::Lock lock = cache.lock(kKey, kLong);
    const pid_t pid = fork();
    if (pid == 0) pause();
    if (write(ends[1], &pid, sizeof pid) != sizeof pid) return 1;
    raise(SIGKILL);
    return 2;
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(read(ends[0], &grandchild, sizeof grandchild), ssize_t{sizeof grandchild});
  // the child of the fork may need a moment to get to the closing
  EXPECT_TRUE(comes_true([&] { return !cache.lock(kKey, milliseconds(0)).waited(); }));
  EXPECT_EQ(kill(grandchild, 0), 0);
  kill(grandchild, SIGKILL);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(DiskCacheTest, WhereNoLockCanBeMadeWorkGoesOn) {
  DiskCache cache(in("cache"));
  std::filesystem::create_directory(in("cache/" + to_hex(kKey) + ".lock"));
  EXPECT_FALSE(cache.lock(kKey, kSoon).waited());
}

}  // namespace
}  // namespace acc::jit
