#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <cstring>
#include <sstream>

#include "csrc/base/stats.h"
#include "kernels/jit/compile.h"
#include "kernels/jit/machine.h"
#include "kernels/jit/toolchain.h"
#include "tests/cpp/jit_helpers.h"

// The leak sanitizer asks for this when the process ends.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off();
int __lsan_is_turned_off() { return acc::jit::is_child; }

namespace acc::jit {
namespace {

constexpr const char* kPreamble =
    "#define API extern \"C\" __attribute__((visibility(\"default\")))\n";

// A kernel that returns a number, with a name that no other test uses: the process keeps kernels.
Source source(int value) {
  static std::atomic<int> count{0};
  const std::string name = "kernel_" + std::to_string(getpid()) + "_" + std::to_string(++count);
  return {name, "API int " + name + "() { return " + std::to_string(value) + "; }"};
}

std::shared_ptr<Job> finished(std::vector<Source> sources) {
  std::shared_ptr<Job> job = compile(kPreamble, std::move(sources));
  job->wait();
  return job;
}

int call(void* function) {
  return function == nullptr ? -1 : reinterpret_cast<int (*)()>(function)();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// For children of a fork, which want a kernel: their exit status, 0 when they got it.
int want(const Source& kernel, int value) {
  const auto job = finished({kernel});
  if (call(job->function(kernel.name)) == value) return 0;
  fprintf(stderr, "%s\n", job->error().c_str());
  return 1;
}

// Whether a process that a script wrote the number of has ended.
bool is_gone(const std::string& file) {
  const std::string text = read_text(file);
  return !text.empty() && kill(std::stoi(text), 0) != 0;
}

// How many threads block all signals but those of faults of their own, SIGKILL, SIGSTOP and the
// three or four of the C library.
size_t threads_without_signals() {
  const std::vector<std::string> states = threads();
  return static_cast<size_t>(
      std::count_if(states.begin(), states.end(), [](const std::string& status) {
        constexpr auto bit = [](int signal) { return uint64_t{1} << (signal - 1); };
        constexpr uint64_t kOthers =
            ~((uint64_t{15} << 31) | bit(SIGKILL) | bit(SIGSTOP) | bit(SIGSEGV) | bit(SIGBUS) |
              bit(SIGFPE) | bit(SIGILL) | bit(SIGABRT) | bit(SIGTRAP));
        const size_t mask = status.find("SigBlk:\t");
        if (mask == std::string::npos) return false;  // it has just ended
        return (std::stoull(status.substr(mask + 8), nullptr, 16) & kOthers) == kOthers;
      }));
}

constexpr const char* kHang = "echo $$ > \"$here/pid\"; exec sleep 1000";

class CompileTest : public JitTest {
 protected:
  // The job of a compiler that hangs, once it does.
  std::shared_ptr<Job> hanging(const Source& kernel) {
    use_compiler(kHang, "hanging");
    std::shared_ptr<Job> job = compile(kPreamble, {kernel});
    EXPECT_TRUE(comes_true([&] { return !read_text(in("pid")).empty(); }));
    return job;
  }

  // Ends what `hanging` began, so that the next test has a thread.
  void end(const Job& job) {
    kill(-std::stoi(read_text(in("pid"))), SIGKILL);
    job.wait();
  }

  // Expects that a compiler which does `body` gives no kernel, and an error with `part` in it; that
  // nobody asks it again; and that nothing is left of it.
  std::string expect_failure(const std::string& body, const std::string& part) {
    const std::string compiler = use_compiler(body);
    const Source kernel = source(1);
    const auto job = finished({kernel});
    EXPECT_EQ(job->function(kernel.name), nullptr);
    EXPECT_TRUE(contains(job->error(), part)) << job->error();
    EXPECT_TRUE(contains(job->error(), compiler)) << job->error();
    EXPECT_EQ(finished({kernel})->error(), job->error());
    EXPECT_EQ(runs(), 1u);
    EXPECT_EQ(listing("tmp"), std::vector<std::string>());
    EXPECT_EQ(listing("cache"), std::vector<std::string>());
    return job->error();
  }
};

// --- what goes well -----------------------------------------------------------------------------

TEST_F(CompileTest, KernelsBecomeFunctions) {
  const Source one = source(1);
  const Source two = source(2);
  const auto job = compile(kPreamble, {one, two});
  job->wait();
  EXPECT_TRUE(job->done());
  EXPECT_EQ(job->error(), "");
  EXPECT_EQ(call(job->function(one.name)), 1);
  EXPECT_EQ(call(job->function(two.name)), 2);
  EXPECT_EQ(job->function("no_such_kernel"), nullptr);
  EXPECT_EQ(cache_problem(), "");
  EXPECT_EQ(listing("tmp"), std::vector<std::string>());
  EXPECT_EQ(listing("cache").size(), 2u);
}

TEST_F(CompileTest, KernelsMayCallTheMathLibraryAndTheCompilersHelpers) {
  Source math = source(0);
  math.text = "extern \"C\" double tgamma(double); typedef __int128 wide; API int " + math.name +
              "() { volatile wide a = 1000; volatile double x = 4; return int(a / 7) + "
              "int(tgamma(x)); }";
  const auto job = finished({math});
  EXPECT_EQ(job->error(), "");
  EXPECT_EQ(call(job->function(math.name)), 142 + 6);
}

TEST_F(CompileTest, AJobWithoutKernelsIsDone) {
  const auto job = compile(kPreamble, {});
  EXPECT_TRUE(job->done());
  job->wait();
  EXPECT_EQ(job->error(), "");
}

TEST_F(CompileTest, WaitingMayBeLimited) {
  use_compiler("while [ ! -e \"$here/go\" ]; do sleep 0.01; done\nreal \"$@\"");
  const auto job = compile(kPreamble, {source(3)});
  EXPECT_FALSE(job->wait_for(std::chrono::milliseconds(20)));
  write_text(in("go"), "");
  EXPECT_TRUE(job->wait_for(std::chrono::minutes(1)));
  EXPECT_EQ(job->error(), "");
}

TEST_F(CompileTest, ABatchIsOneRunOfTheCompiler) {
  use_compiler("real \"$@\"");
  std::vector<Source> sources;
  sources.reserve(20);
  for (int i = 0; i < 20; ++i) sources.push_back(source(i));
  const auto job = finished(sources);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(call(job->function(sources[i].name)), i);
  EXPECT_EQ(runs(), 1u);
  EXPECT_EQ(cache_info().files, 1u);
}

TEST_F(CompileTest, JobsThatWantTheSameKernelShareIt) {
  use_compiler("until [ -e \"$here/go\" ]; do sleep 0.01; done; real \"$@\"");
  const Source shared = source(3);
  const Source other = source(4);
  const auto first = compile(kPreamble, {shared, shared});
  const auto second = compile(kPreamble, {other, shared});
  EXPECT_FALSE(first->done());
  EXPECT_FALSE(second->done());
  EXPECT_EQ(first->function(shared.name), nullptr);
  EXPECT_EQ(first->error(), "");
  write_text(in("go"), "");
  first->wait();
  second->wait();
  EXPECT_EQ(call(first->function(shared.name)), 3);
  EXPECT_EQ(first->function(shared.name), second->function(shared.name));
  EXPECT_EQ(call(second->function(other.name)), 4);
  EXPECT_EQ(first->function(other.name), nullptr);  // not of this job
  EXPECT_EQ(runs(), 2u);
  EXPECT_TRUE(compile(kPreamble, {shared})->done());
}

TEST_F(CompileTest, NoMoreThanTwoCompilersRunAtOnce) {
  use_compiler(
      "mkdir \"$here/one\" 2>/dev/null && mine=one || { mkdir \"$here/two\" 2>/dev/null && "
      "mine=two; } || echo > \"$here/three\"\n"
      "sleep 0.05; rmdir \"$here/$mine\"; real \"$@\"");
  std::vector<std::shared_ptr<Job>> jobs;
  jobs.reserve(6);
  for (int i = 0; i < 6; ++i) jobs.push_back(compile(kPreamble, {source(i)}));
  for (const auto& job : jobs) {
    job->wait();
    EXPECT_EQ(job->error(), "");
  }
  EXPECT_FALSE(std::filesystem::exists(in("three")));
}

TEST_F(CompileTest, ThreadsEndWhenThereIsNothingToDo) {
  const int status = in_child([] {
    const size_t before = threads().size();
    for (int i = 0; i < 2; ++i) {
      if (finished({source(i)})->error() != "") return 1;
      if (!comes_true([&] { return threads().size() == before; })) return 2;
    }
    return 0;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(CompileTest, TheCompilerIsAProcessOfItsOwnAndThreadsTakeNoSignals) {
  wait_for_threads();
  const auto job = hanging(source(1));
  EXPECT_EQ(threads_without_signals(), kThreadsOfSanitizer + 1);
  const int pid = std::stoi(read_text(in("pid")));
  EXPECT_EQ(getpgid(pid), pid);
  const std::string folder = "/proc/" + std::to_string(pid);
  EXPECT_EQ(std::filesystem::read_symlink(folder + "/fd/0"), "/dev/null");
  EXPECT_TRUE(contains(read_text(folder + "/status"), "SigBlk:\t0000000000000000\n"));
  end(*job);
}

TEST_F(CompileTest, AProgramWithoutStandardStreamsCompiles) {
  use_compiler("real \"$@\"");
  const Source kernel = source(3);
  EXPECT_EQ(in_child([&] {
              for (const int fd : {0, 1, 2}) close(fd);
              return want(kernel, 3);
            }),
            0);
  const Source wrong{source(1).name, "API this is no C++"};
  EXPECT_EQ(in_child([&] {
              for (const int fd : {0, 1, 2}) close(fd);
              return contains(finished({wrong})->error(), "kernels.cpp") ? 0 : 1;
            }),
            0);
}

// --- which compiler -----------------------------------------------------------------------------

TEST_F(CompileTest, WithoutACompilerEveryJobSaysSo) {
  set("PATH", in("tmp"));
  for (int i = 0; i < 2; ++i) {
    const Source kernel = source(1);
    const auto job = finished({kernel});
    EXPECT_EQ(job->function(kernel.name), nullptr);
    EXPECT_TRUE(contains(job->error(), "no C++ compiler")) << job->error();
  }
}

TEST_F(CompileTest, TheFirstInThePathThatCanBeRunIsTaken) {
  std::filesystem::create_directories(in("a/g++"));  // no file
  std::filesystem::create_directory(in("b"));
  write_text(in("b/g++"), "not executable");
  std::filesystem::create_directory(in("c"));
  write_script(in("c/clang++"), "real \"$@\"");
  // with the test's directory as the current one, these would be compilers
  std::filesystem::create_directory(in("relative"));
  for (const char* wrong : {"relative/g++", "g++"}) write_script(in(wrong), "exit 1");
  set("PATH", "relative::" + in("a") + ":" + in("b") + ":" + in("c"));
  const Source kernel = source(1);
  EXPECT_EQ(in_child([&] { return chdir(in("").c_str()) == 0 ? want(kernel, 1) : 2; }), 0);
  EXPECT_EQ(runs(), 1u);
}

TEST_F(CompileTest, TheVariableMayBeANameOrAPath) {
  write_script(in("tmp/mine"), "real \"$@\"");
  set("ACC_CXX", in("tmp/mine"));
  EXPECT_EQ(finished({source(1)})->error(), "");
  set("ACC_CXX", "mine");
  EXPECT_TRUE(contains(finished({source(1)})->error(), "ACC_CXX=mine is not a program in PATH"));
  set("PATH", in("tmp") + ":" + getenv("PATH"));
  EXPECT_EQ(finished({source(1)})->error(), "");
  EXPECT_EQ(runs(), 2u);
  set("ACC_CXX", in("none"));
  EXPECT_TRUE(contains(finished({source(1)})->error(), "none is not an executable file"));
}

TEST_F(CompileTest, AnOldNameForTheProcessorIsTriedOnce) {
  use_compiler(
      "case \"$*\" in *-march=native*) echo \"unsupported: native\" >&2; exit 1;; esac\n"
      "case \"$*\" in *-mcpu=native*) echo \"unsupported: native\" >&2; exit 1;; esac\n"
      "real \"$@\"");
  EXPECT_EQ(finished({source(1)})->error(), "");
  EXPECT_EQ(runs(), 3u);
}

TEST_F(CompileTest, ACompilerWithoutGccsLibraryLinksItsOwn) {
  use_compiler(
      "case \"$*\" in *-lgcc*) echo \"cannot find -lgcc\" >&2; exit 1;; esac\nreal \"$@\"");
  EXPECT_EQ(finished({source(1)})->error(), "");
  EXPECT_EQ(runs(), 2u);
}

TEST_F(CompileTest, ABadSettingIsAnErrorOfTheJob) {
  set("ACC_COMPILE_TIMEOUT_S", "soon");
  EXPECT_TRUE(contains(finished({source(1)})->error(), "ACC_COMPILE_TIMEOUT_S=soon"));
}

// --- compilers that misbehave -------------------------------------------------------------------

TEST_F(CompileTest, ACompilerThatFails) {
  expect_failure("echo \"kernels.cpp:1: what is this\" >&2; exit 3",
                 "ended with status 3: kernels.cpp:1: what is this.");
}

// It names files in a directory that is another one each time.
TEST_F(CompileTest, TheSameFailureHasTheSameText) {
  use_compiler("echo \"$*: what is this\" >&2; exit 3");
  const std::string first = finished({source(1)})->error();
  EXPECT_TRUE(contains(first, " kernels.cpp -o kernels.so")) << first;
  EXPECT_EQ(finished({source(2)})->error(), first);
}

TEST_F(CompileTest, OfWhatACompilerSaysTheFirstFourKilobytesAreKept) {
  const std::string error = expect_failure(
      "printf 'begin\\377\\001' >&2; yes word | head -c 100000 >&2; exit 1", "begin??word\nword\n");
  EXPECT_GT(error.size(), 4096u);
  EXPECT_LT(error.size(), 4096u + 1000u);
}

TEST_F(CompileTest, ACompilerThatCrashes) {
  expect_failure("kill -SEGV $$", "was ended by signal 11");
}

TEST_F(CompileTest, ACompilerThatSaysNothingAndWritesNothing) {
  expect_failure("exit 0", "succeeded without a result");
}

// The name of the output is the argument after -o.
constexpr const char* kOutput =
    "for word in \"$@\"; do [ \"$last\" = -o ] && out=$word; last=$word; done\n";

TEST_F(CompileTest, ACompilerThatWritesGarbage) {
  expect_failure(std::string(kOutput) + "echo garbage > \"$out\"", "is no whole library");
}

TEST_F(CompileTest, ACompilerThatWritesHalfAFile) {
  expect_failure(
      std::string(kOutput) +
          "real \"$@\"; head -c 9000 \"$out\" > \"$out.half\"; mv \"$out.half\" \"$out\"",
      "is no whole library");
}

TEST_F(CompileTest, ACompilerThatLeavesAKernelOut) {
  use_compiler("real \"$@\"");
  const Source there = source(1);
  const Source missing{source(2).name, ""};
  const auto job = finished({there, missing});
  EXPECT_EQ(call(job->function(there.name)), 1);
  EXPECT_EQ(job->function(missing.name), nullptr);
  EXPECT_TRUE(contains(job->error(), "left out the kernel " + missing.name)) << job->error();
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(CompileTest, AKernelThatNeedsAnUnknownFunctionIsNotLoaded) {
  Source kernel = source(1);
  kernel.text = "extern \"C\" int acc_no_such_function(); API int " + kernel.name +
                "() { return acc_no_such_function(); }";
  const auto job = finished({kernel});
  EXPECT_TRUE(contains(job->error(), "acc_no_such_function")) << job->error();
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
  EXPECT_EQ(cache_problem(), "");
}

TEST_F(CompileTest, ACompilerThatHangsIsEndedWithItsChildren) {
  set("ACC_COMPILE_TIMEOUT_S", "1");
  expect_failure("sleep 1000 & echo $! > \"$here/child\"; echo $$ > \"$here/pid\"; wait",
                 "took longer than 1 s");
  EXPECT_TRUE(comes_true([&] { return is_gone(in("pid")) && is_gone(in("child")); }));
}

TEST_F(CompileTest, WhatACompilerLeavesRunningIsNotWaitedFor) {
  use_compiler("sleep 1000 & echo $! > \"$here/child\"; real \"$@\"");
  EXPECT_EQ(finished({source(1)})->error(), "");
  EXPECT_TRUE(comes_true([&] { return is_gone(in("child")); }));
}

TEST_F(CompileTest, WhatAReplacedCompilerMadeIsUsedAndNotKept) {
  use_compiler("cp \"$0\" \"$0.new\"; mv \"$0.new\" \"$0\"; real \"$@\"");
  const Source kernel = source(5);
  const auto job = finished({kernel});
  EXPECT_EQ(call(job->function(kernel.name)), 5);
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(CompileTest, ACompilerIsUsedThoughNobodyHearsOfItsEnd) {
  const auto before = signal(SIGCHLD, SIG_IGN);
  const Source kernel = source(5);
  const auto job = finished({kernel});
  signal(SIGCHLD, before);
  EXPECT_EQ(call(job->function(kernel.name)), 5) << job->error();
}

// --- the cache ----------------------------------------------------------------------------------

TEST_F(CompileTest, TheNextProcessCompilesNothing) {
  use_compiler("real \"$@\"");
  const Source kernel = source(8);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(in_child([&] { return want(kernel, 8); }), 0);
  EXPECT_EQ(runs(), 1u);
}

TEST_F(CompileTest, WhatDecidesWhatAKernelIsIsPartOfItsKey) {
  const std::string compiler = use_compiler("real \"$@\"");
  const Source kernel = source(8);
  const auto expect_runs = [&](size_t expected) {
    EXPECT_EQ(in_child([&] { return want(kernel, 8); }), 0);
    EXPECT_EQ(runs(), expected);
  };
  expect_runs(1);
  expect_runs(1);
  EXPECT_EQ(in_child([&] {
              const auto job = compile(std::string(kPreamble) + "// changed\n", {kernel});
              job->wait();
              return call(job->function(kernel.name)) == 8 ? 0 : 1;
            }),
            0);
  EXPECT_EQ(runs(), 2u);
  const Source other{kernel.name, kernel.text + " // changed"};
  EXPECT_EQ(in_child([&] { return want(other, 8); }), 0);
  EXPECT_EQ(runs(), 3u);
  const timespec times[2] = {{1, 0}, {1, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, compiler.c_str(), times, 0), 0);
  expect_runs(4);
  const std::string another = use_compiler("real \"$@\"", "another");
  ASSERT_EQ(utimensat(AT_FDCWD, another.c_str(), times, 0), 0);
  expect_runs(5);  // the same but for its path
  write_text(compiler, read_text(compiler) + "# longer\n");
  set("ACC_CXX", compiler);
  ASSERT_EQ(utimensat(AT_FDCWD, compiler.c_str(), times, 0), 0);
  expect_runs(6);
}

// The host's compiler as a machine with other features has it.
class OnProcessor final : public Toolchain {
 public:
  explicit OnProcessor(std::string features) : features_(std::move(features)) {}
  std::string options() const override {
    std::string options = host_.options();
    const std::string mine = processor_text();
    const size_t at = options.find(mine);
    return at == std::string::npos ? options : options.replace(at, mine.size(), features_);
  }

  std::string name() const override { return host_.name(); }
  size_t most_together() const override { return host_.most_together(); }
  Compiler find(const Settings& settings) const override { return host_.find(settings); }
  std::string version(const Compiler& compiler, const Settings& settings) const override {
    return host_.version(compiler, settings);
  }
  Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
              std::string_view text) const override {
    return host_.build(compiler, settings, workspace, text);
  }
  void* load(int fd, std::string& problem) const override { return host_.load(fd, problem); }
  void* load(std::string_view bytes, std::string& problem) const override {
    return host_.load(bytes, problem);
  }
  void* find_function(void* library, const std::string& name) const override {
    return host_.find_function(library, name);
  }

 private:
  const Toolchain& host_ = host_toolchain();
  std::string features_;
};

// Machines of several kinds may share a home directory: AVX-512 on one is an illegal instruction
// on another.
TEST_F(CompileTest, EachKindOfProcessorHasKernelsOfItsOwn) {
  use_compiler("real \"$@\"");
  const Source kernel = source(8);
  const auto expect_runs = [&](const std::string& features, size_t expected) {
    const int status = in_child([&] {
      const OnProcessor toolchain(features);
      const auto job = compile(kPreamble, {kernel}, toolchain);
      job->wait();
      return call(job->function(kernel.name)) == 8 ? 0 : 1;
    });
    EXPECT_EQ(status, 0);
    EXPECT_EQ(runs(), expected) << features;
  };
  expect_runs(processor_text(), 1);
  expect_runs("avx avx2 ", 2);
  expect_runs("avx avx2 avx512f ", 3);
  for (const std::string& features : {processor_text(), std::string("avx avx2 ")}) {
    expect_runs(features, 3);
  }
}

TEST(Machine, AProcessorIsTheSetOfItsFeatures) {
  const auto features = [](const std::string& text) {
    std::istringstream cpuinfo(text);
    return processor_text(cpuinfo);
  };
  EXPECT_EQ(features("processor\t: 0\nflags\t\t: fpu avx2 avx\nbugs\t\t: spectre\n"),
            "avx avx2 fpu ");
  EXPECT_EQ(features("flags : avx fpu avx2\nflags : sse\n"), "avx avx2 fpu ");
  EXPECT_EQ(features("processor\t: 0\nFeatures\t: fp asimd\n"), "asimd fp ");
  EXPECT_EQ(features("processor\t: 0\n"), "");
  EXPECT_EQ(processor_text().empty(), access("/proc/cpuinfo", R_OK) != 0);
}

TEST_F(CompileTest, OnlyWhatIsMissingIsCompiled) {
  use_compiler("real \"$@\"");
  const Source old = source(1);
  const Source fresh = source(2);
  EXPECT_EQ(in_child([&] { return want(old, 1); }), 0);
  base::reset_counters();
  const auto job = finished({old, fresh});
  EXPECT_EQ(call(job->function(old.name)), 1);
  EXPECT_EQ(call(job->function(fresh.name)), 2);
  EXPECT_EQ(base::value_keyed("jit", "compiled"), 1u);
}

TEST_F(CompileTest, ProcessesThatWantTheSameAtOnceCompileItOnce) {
  use_compiler("sleep 0.2; real \"$@\"");
  const Source kernel = source(9);
  std::vector<pid_t> children;
  wait_for_threads();
  for (int i = 0; i < 4; ++i) {
    const pid_t pid = fork();
    if (pid == 0) _exit(want(kernel, 9));
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = -1;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(runs(), 1u);
  EXPECT_EQ(listing("cache").size(), 1u);
}

TEST_F(CompileTest, AProcessThatHoldsTheLockForEverIsNotWaitedForSo) {
  const std::string script =
      "if mkdir \"$here/first\" 2>/dev/null; then echo $$ > \"$here/pid\"; sleep 1000; fi; "
      "real \"$@\"";
  use_compiler(script);
  const Source kernel = source(9);
  wait_for_threads();
  const pid_t holder = fork();
  if (holder == 0) _exit(want(kernel, 9));
  EXPECT_TRUE(comes_true([&] { return !read_text(in("pid")).empty(); }));
  // It is as long as this one's own compiler may take, too.
  set("ACC_COMPILE_TIMEOUT_S", "5");
  EXPECT_EQ(in_child([&] { return want(kernel, 9); }), 0);
  kill(holder, SIGKILL);
  kill(-std::stoi(read_text(in("pid"))), SIGKILL);
  waitpid(holder, nullptr, 0);
}

TEST_F(CompileTest, ARefusedCacheIsToldAndKernelsAreMade) {
  write_text(in("file"), "x");
  set("ACC_CACHE_DIR", in("file"));
  const Source kernel = source(4);
  const int status = in_child([&] {
    if (want(kernel, 4) != 0) return 1;
    return contains(cache_problem(), "not a directory") ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(contains(cache_info().problem, "not a directory"));
  EXPECT_EQ(cache_info().files, 0u);
}

TEST_F(CompileTest, WithoutAHomeKernelsAreMade) {
  for (const char* name : {"ACC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) set(name, "");
  const Source kernel = source(4);
  EXPECT_EQ(in_child([&] { return want(kernel, 4); }), 0);
  EXPECT_TRUE(contains(cache_info().problem, "HOME"));
}

TEST_F(CompileTest, TheUsersCacheDirectoryIsTheUsualOne) {
  set("ACC_CACHE_DIR", "");
  set("HOME", in("home"));
  set("XDG_CACHE_HOME", "relative");
  EXPECT_EQ(cache_info().directory, in("home/.cache/torchacc/kernels"));
  set("XDG_CACHE_HOME", in("xdg"));
  EXPECT_EQ(cache_info().directory, in("xdg/torchacc/kernels"));
  EXPECT_EQ(cache_info().problem, "");
  finished({source(1)});
  EXPECT_EQ(listing("xdg/torchacc/kernels").size(), 1u);
}

TEST_F(CompileTest, OnAFullDiskKernelsAreMadeAndNothingIsKept) {
  use_compiler("ulimit -S -f unlimited; real \"$@\"");
  const Source kernel = source(4);
  const int status = in_child([&] {
    // our own files do not fit, for root as well; those of the compiler do
    const rlimit limit{4096, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    if (want(kernel, 4) != 0) return 2;
    return contains(cache_problem(), "cannot be kept") ? 0 : 3;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(CompileTest, ADirectoryForTemporaryFilesThatCannotBeUsedIsPassedOver) {
  write_text(in("file"), "x");
  set("TMPDIR", in("file"));
  EXPECT_EQ(finished({source(1)})->error(), "");
}

TEST_F(CompileTest, TheCacheStaysBelowItsLimit) {
  set("ACC_CACHE_MB", "1");
  constexpr uint64_t kLimit = 1 << 20;
  EXPECT_EQ(cache_info().max_bytes, kLimit);
  std::vector<Source> large;
  for (int i = 0; i < 5; ++i) {
    large.push_back(source(i));
    large.back().text += "\nextern const char filler[300000] = {1};\n";
    const auto job = finished({large.back()});
    EXPECT_EQ(call(job->function(large.back().name)), i);
    EXPECT_LE(cache_info().bytes, kLimit);
    EXPECT_GT(cache_info().bytes, kLimit / 5);
  }
  clear_cache();
  EXPECT_EQ(cache_info().files, 0u);
  EXPECT_EQ(cache_info().bytes, 0u);
  EXPECT_EQ(call(finished({large[0]})->function(large[0].name)), 0);  // what is loaded stays
}

// --- the end of the process, forks, signals -----------------------------------------------------

TEST_F(CompileTest, AProcessEndsThoughItsCompilerHangs) {
  const int status = in_child([&] {
    hanging(source(1));
    exit(7);
    return 1;
  });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_TRUE(comes_true([&] { return is_gone(in("pid")); }));
  EXPECT_EQ(listing("tmp"), std::vector<std::string>());
  EXPECT_EQ(listing("cache"), std::vector<std::string>());
}

TEST_F(CompileTest, InAChildOfAForkNothingIsWaitedFor) {
  const Source before = source(1);
  finished({before});
  const Source kernel = source(2);
  const auto job = hanging(kernel);
  const int status = in_child(
      [&] {
        if (!job->done()) return 1;
        job->wait();
        if (job->function(kernel.name) != nullptr) return 2;
        if (!contains(job->error(), "forked")) return 3;
        if (call(compile(kPreamble, {before})->function(before.name)) != 1) return 4;
        return 0;
      },
      Fork::BesideThreads);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(job->done());
  EXPECT_FALSE(is_gone(in("pid")));  // the child took nothing away from its parent
  end(*job);
}

TEST_F(CompileTest, AChildOfAForkMayCompileItself) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer lets no child of a process with threads start one";
#endif
  use_compiler("until [ -e \"$here/go\" ]; do sleep 0.01; done; real \"$@\"");
  const Source kernel = source(2);
  const auto job = compile(kPreamble, {kernel});
  const auto other = compile(kPreamble, {source(3)});  // as many as may run
  const size_t running = std::min(2u, std::thread::hardware_concurrency());
  EXPECT_TRUE(comes_true([&] { return runs() == running; }));
  set("ACC_CXX", "");
  EXPECT_EQ(in_child([&] { return want(kernel, 2); }, Fork::BesideThreads), 0);
  EXPECT_EQ(in_child(
                [&] {
                  exit(want(kernel, 2));  // with what runs at an exit
                  return 1;
                },
                Fork::BesideThreads),
            0);
  write_text(in("go"), "");
  job->wait();
  other->wait();
  EXPECT_EQ(call(job->function(kernel.name)), 2) << job->error();
  EXPECT_EQ(other->error(), "");
}

std::atomic<int> interrupts{0};

TEST_F(CompileTest, AnInterruptDuringACompilationHarmsNothing) {
  use_compiler("echo $$ > \"$here/pid\"; sleep 0.2; real \"$@\"");
  const Source kernel = source(6);
  const int status = in_child([&] {
    // as Ctrl-C does: to the whole process group, and the program goes on, as Python does
    setpgid(0, 0);
    signal(SIGINT, [](int) { ++interrupts; });
    const auto job = compile(kPreamble, {kernel});
    if (!comes_true([&] { return !read_text(in("pid")).empty(); })) return 1;
    if (kill(0, SIGINT) != 0) return 2;
    job->wait();
    if (interrupts != 1) return 3;
    return call(job->function(kernel.name)) == 6 ? 0 : 4;
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(runs(), 1u);
  EXPECT_EQ(in_child([&] { return want(kernel, 6); }), 0);
  EXPECT_EQ(runs(), 1u);  // it was kept
}

TEST_F(CompileTest, AProcessThatIsKilledLeavesASoundCache) {
  // The first does not come to its end, however late the process is killed.
  use_compiler(
      "if mkdir \"$here/first\" 2>/dev/null; then echo $$ > \"$here/pid\"; exec sleep 1000; fi; "
      "real \"$@\"");
  const Source kernel = source(6);
  const int status = in_child([&] {
    compile(kPreamble, {kernel});
    comes_true([&] { return !read_text(in("pid")).empty(); });
    raise(SIGKILL);
    return 1;
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(in_child([&] { return want(kernel, 6); }), 0);
  EXPECT_EQ(runs(), 2u);
  kill(-std::stoi(read_text(in("pid"))), SIGKILL);  // nobody ends it where its parent is gone
}

}  // namespace
}  // namespace acc::jit
