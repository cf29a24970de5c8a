#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/env.h"

// A directory for one test, an environment of its own, compilers that misbehave, and processes.
namespace acc::jit {

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

inline bool is_root() { return geteuid() == 0; }

// Waits for something that another thread or process does. A test never passes because of the time
// this takes; a minute without it is a failure.
template <class Condition>
bool comes_true(const Condition& condition) {
  for (int i = 0; i < 60'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

#if defined(__SANITIZE_THREAD__)
inline constexpr size_t kThreadsOfSanitizer = 1;
#else
inline constexpr size_t kThreadsOfSanitizer = 0;
#endif

// The threads of this process, as the kernel describes them; not one that ends just then.
inline std::vector<std::string> threads() {
  std::vector<std::string> states;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    try {
      states.push_back(read_text(entry.path() / "status"));
    } catch (const std::ios_base::failure&) {
    }
  }
  return states;
}

// Waits for threads that have nothing to do any more and are about to end. A fork in the middle of
// that leaves the child what they hold: no lock of ours, but locks within a sanitizer.
inline void wait_for_threads() {
  EXPECT_TRUE(comes_true([] { return threads().size() <= 1 + kThreadsOfSanitizer; }));
}

class JitTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "jit-test-XXXXXX";
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    directory_ = path;
    std::filesystem::create_directory(in("tmp"));
    for (const char* name : {"ACC_CXX", "ACC_COMPILE_TIMEOUT_S", "ACC_CACHE_MB"}) set(name, "");
    set("ACC_CACHE_DIR", in("cache"));
    set("TMPDIR", in("tmp"));
  }

  void TearDown() override {
    for (const auto& [name, value] : saved_) {
      value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
    }
    base::env::forget_for_testing();
    std::filesystem::remove_all(directory_);
  }

  std::string in(const std::string& name) const { return directory_ + "/" + name; }

  void set(const std::string& name, const std::string& value) {
    const char* old = getenv(name.c_str());
    saved_.emplace(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
    setenv(name.c_str(), value.c_str(), 1);
    base::env::forget_for_testing();
  }

  // A script in the test's directory that ACC_CXX names from now on. Like a compiler, it answers
  // --version; `body` is what it does else, where `real` stands for a compiler that works.
  std::string use_compiler(const std::string& body, const std::string& name = "compiler") {
    const std::string path = in(name);
    write_script(path, body);
    set("ACC_CXX", path);
    return path;
  }

  void write_script(const std::string& path, const std::string& body) {
    write_text(path, "#!/bin/sh\nreal() { PATH=/usr/bin:/bin " + real_compiler() +
                         " \"$@\"; }\n"
                         "here='" +
                         directory_ +
                         "'\n"
                         "if [ \"$1\" = --version ]; then echo \"script 1.0\"; exit 0; fi\n"
                         "echo run >> \"$here/runs\"\n" +
                         body + "\n");
    chmod(path.c_str(), 0755);
  }

  // How often the script was asked to compile.
  size_t runs() const {
    const std::string text = read_text(in("runs"));
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  static std::string real_compiler() {
    for (const char* path : {"/usr/bin/g++", "/usr/bin/clang++", "/usr/bin/c++"}) {
      if (access(path, X_OK) == 0) return path;
    }
    return "c++";
  }

  // What lies in a directory of the test.
  std::vector<std::string> listing(const std::string& name) const {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(in(name), none)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

 private:
  std::string directory_;
  std::map<std::string, std::optional<std::string>> saved_;
};

// Whether this is a child of `in_child`. It has what threads of its parent had allocated, and no
// thread to free it: its leaks are none.
inline bool is_child = false;

// Runs `body` in a child of a fork and returns its wait status. What it returns is the exit status.
enum class Fork { Alone, BesideThreads };
template <class Body>
int in_child(const Body& body, Fork how = Fork::Alone) {
  if (how == Fork::Alone) wait_for_threads();
  fflush(stdout);  // or a child that calls exit prints it again
  const pid_t pid = fork();
  if (pid == 0) {
    is_child = true;
    _exit(body());
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

}  // namespace acc::jit
