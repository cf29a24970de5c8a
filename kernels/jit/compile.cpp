#include "kernels/jit/compile.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"
#include "csrc/base/signals.h"
#include "csrc/base/stats.h"
#include "kernels/jit/compiler.h"
#include "kernels/jit/disk_cache.h"
#include "kernels/jit/process.h"
#include "kernels/jit/settings.h"
#include "kernels/jit/toolchain.h"

namespace acc::jit {
namespace {

// Forks between the first process and this one. Whatever began under another number has lost its
// thread.
std::atomic<uint64_t> forks{0};

}  // namespace

struct Kernel {
  std::string name;
  std::string text;
  const uint64_t born = forks;

  // Written by the thread that makes the kernel, before `finished`.
  void* function = nullptr;
  std::string error;
  std::atomic<int> finished{0};

  bool done() const { return finished.load(std::memory_order_acquire) != 0 || lost(); }
  bool lost() const { return born != forks && finished.load(std::memory_order_acquire) == 0; }
  void finish() {
    text = {};
    finished.store(1, std::memory_order_release);
    finished.notify_all();
  }
};

namespace {

using Kernels = std::vector<std::shared_ptr<Kernel>>;

// What one call of compile() found neither made nor being made.
struct Batch {
  const Toolchain* toolchain = nullptr;
  std::string preamble;
  Kernels kernels;
  Settings settings;
};

struct State {
  // By the names of toolchain and kernel, for ever.
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Kernel>> kernels;
  std::deque<Batch> waiting;
  int threads = 0;
  std::string cache_problem;
  // By the toolchain's name, the version of the compiler that was asked last; asking costs as much
  // as loading ten kernels.
  std::map<std::string, std::pair<Compiler, std::string>> versions;
};

std::mutex mutex;                  // guards the state
State& state = *new State;         // never destroyed: threads may run when the process ends
constexpr int kMaxThreads = 8;     // as many compilers
constexpr int kExitWaitMs = 2000;  // for threads to tidy up after killed compilers

// --- one batch ----------------------------------------------------------------------------------

// Kept when a later batch has none: whoever reports it may come late.
void note_problem(const std::string& problem) {
  if (problem.empty()) return;
  const std::lock_guard lock(mutex);
  state.cache_problem = problem;
}

std::string version_of(const Batch& batch, const Compiler& compiler) {
  const std::string name = batch.toolchain->name();
  {
    const std::lock_guard lock(mutex);
    const auto known = state.versions.find(name);
    if (known != state.versions.end() && known->second.first == compiler) {
      return known->second.second;
    }
  }
  std::string version = batch.toolchain->version(compiler, batch.settings);
  const std::lock_guard lock(mutex);
  state.versions[name] = {compiler, version};
  return version;
}

// Everything but the kernel's own text that decides what a library holds.
base::Hash128 key_of_batch(const Batch& batch, const Compiler& compiler) {
  base::Hasher hasher;
  hasher.add(DiskCache::kFormat);
  hasher.add(std::string_view(batch.preamble));
  hasher.add(std::string_view(batch.toolchain->name()));
  hasher.add(std::string_view(batch.toolchain->options()));
  hasher.add(std::string_view(compiler.path));
  hasher.add(compiler.identity.bytes);
  hasher.add(compiler.identity.modified_ns);
  hasher.add(std::string_view(version_of(batch, compiler)));
  return hasher.finish();
}

base::Hash128 key_of(const base::Hash128& batch, const Kernel& kernel) {
  base::Hasher hasher;
  hasher.add(batch);
  hasher.add(std::string_view(kernel.name));
  hasher.add(std::string_view(kernel.text));
  return hasher.finish();
}

std::vector<base::Hash128> keys_of(const base::Hash128& batch, const Kernels& kernels) {
  std::vector<base::Hash128> keys;
  for (const auto& kernel : kernels) keys.push_back(key_of(batch, *kernel));
  return keys;
}

// Takes what the cache has, and returns the others.
Kernels look_up(DiskCache& cache, const base::Hash128& batch, const Kernels& kernels,
                const Toolchain& toolchain) {
  Kernels missing;
  for (const auto& kernel : kernels) {
    kernel->function = cache.find(key_of(batch, *kernel), kernel->name, toolchain);
    if (kernel->function == nullptr) missing.push_back(kernel);
  }
  return missing;
}

// Loads what was just compiled. Whether every kernel was in it.
bool load(const Built& built, const Kernels& kernels, const Toolchain& toolchain) {
  std::string problem;
  void* library = nullptr;
  if (const Descriptor file(open(built.path.c_str(), O_RDONLY | O_CLOEXEC)); file) {
    library = toolchain.load(file.get(), problem);
  }
  // a directory for temporary files may hold no code
  if (library == nullptr) library = toolchain.load(built.bytes, problem);
  ACC_CHECK(library != nullptr,
            "[jit] compiled kernels could not be loaded and run unfused: ", problem, ".");
  bool complete = true;
  for (const auto& kernel : kernels) {
    kernel->function = toolchain.find_function(library, kernel->name);
    if (kernel->function != nullptr) continue;
    complete = false;
    kernel->error = base::concat("[jit] the compiler left out the kernel ", kernel->name,
                                 ". It runs unfused. Report this.");
  }
  return complete;
}

void make(const Batch& batch) {
  const Settings& settings = batch.settings;
  const Toolchain& toolchain = *batch.toolchain;
  const Compiler compiler = toolchain.find(settings);
  const base::Hash128 key = key_of_batch(batch, compiler);
  DiskCache cache(settings.cache_directory);
  note_problem(cache.problem());
  Kernels missing = look_up(cache, key, batch.kernels, toolchain);
  if (missing.empty()) return;

  // Other processes of the same program want the same kernels at the same time.
  base::Hasher all;
  for (const base::Hash128& one : keys_of(key, missing)) all.add(one);
  const DiskCache::Lock lock = cache.lock(all.finish(), settings.time_limit);
  if (lock.waited()) missing = look_up(cache, key, missing, toolchain);
  if (missing.empty()) return;

  std::string text = batch.preamble;
  for (const auto& kernel : missing) text += base::concat("\n", kernel->text);
  text += "\n";
  const Workspace workspace(settings.temporary);
  const Built built = toolchain.build(compiler, settings, workspace, text);
  base::count_keyed("jit", "compiled", missing.size());
  // What cannot be used is not kept either.
  if (load(built, missing, toolchain) && built.same_compiler) {
    cache.publish(built.bytes, keys_of(key, missing));
    cache.trim(settings.cache_bytes);
  }
  note_problem(cache.problem());
}

// `error` says why those without a function have none.
void finish(const Kernels& kernels, const std::string& error) {
  for (const auto& kernel : kernels) {
    if (kernel->function == nullptr) {
      if (kernel->error.empty()) kernel->error = error;
      base::count_keyed("jit", "failed");
    }
    kernel->finish();
  }
}

// --- threads ------------------------------------------------------------------------------------

void work() {
  for (;;) {
    Batch batch;
    {
      const std::lock_guard lock(mutex);
      if (state.waiting.empty()) {
        --state.threads;
        return;
      }
      batch = std::move(state.waiting.front());
      state.waiting.pop_front();
    }
    std::string error;
    try {
      make(batch);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    // only now: when a job is done, its lock is free and its temporary files are gone
    finish(batch.kernels, error);
  }
}

// The caller holds the mutex.
void start_thread() {
  // Half of a large machine is the program's.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (state.threads >= std::clamp(cores / 2, std::min(2, std::max(cores, 1)), kMaxThreads)) return;
  // Signals are for the program's own threads.
  const base::SignalsBlocked blocked;
  try {
    std::thread(work).detach();
    ++state.threads;
  } catch (const std::system_error& error) {
    if (state.threads == 0) {
      for (const Batch& batch : state.waiting) {
        finish(batch.kernels, base::concat("[jit] no thread for the compiler: ", error.what(),
                                           ". Kernels run unfused. Allow more threads."));
      }
      state.waiting.clear();
    }
  }
}

void prepare_process() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] {
                     ++forks;
                     state.waiting.clear();
                     state.threads = 0;
                     mutex.unlock();
                   });
    std::atexit(stop);
  });
}

}  // namespace

void stop() {
  stop_processes();
  for (int waited = 0; waited < kExitWaitMs; ++waited) {
    {
      const std::lock_guard lock(mutex);
      if (state.threads == 0) return;
    }
    poll(nullptr, 0, 1);
  }
}

bool Job::done() const { return finished() == size(); }

size_t Job::finished() const {
  return static_cast<size_t>(
      std::ranges::count_if(kernels_, [](const auto& entry) { return entry.second->done(); }));
}

void Job::wait() const {
  for (const auto& [name, kernel] : kernels_) {
    while (!kernel->done()) kernel->finished.wait(0);
  }
}

bool Job::wait_for(std::chrono::milliseconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done() && std::chrono::steady_clock::now() < end) poll(nullptr, 0, 1);
  return done();
}

void* Job::function(const std::string& name) const {
  const auto found = kernels_.find(name);
  if (found == kernels_.end()) return nullptr;
  const Kernel& kernel = *found->second;
  return kernel.done() && !kernel.lost() ? kernel.function : nullptr;
}

std::string Job::error() const {
  std::set<std::string> errors;
  if (!done()) return "";
  for (const auto& [name, kernel] : kernels_) {
    if (kernel->lost()) {
      errors.insert(
          "[jit] the process was forked while kernels were compiled, and they belong to the "
          "parent. They run unfused in the child. Start processes with the 'spawn' method.");
    } else if (!kernel->error.empty()) {
      errors.insert(kernel->error);
    }
  }
  std::string text;
  for (const std::string& error : errors) text += (text.empty() ? "" : "\n") + error;
  return text;
}

std::shared_ptr<Job> compile(std::string_view preamble, std::vector<Source> sources,
                             const Toolchain& toolchain) {
  prepare_process();
  auto job = std::make_shared<Job>();
  Kernels made;
  const std::lock_guard lock(mutex);
  for (Source& source : sources) {
    std::shared_ptr<Kernel>& kernel = state.kernels[{toolchain.name(), source.name}];
    if (kernel == nullptr || kernel->lost()) {
      kernel = std::make_shared<Kernel>();
      kernel->name = source.name;
      kernel->text = std::move(source.text);
      made.push_back(kernel);
    }
    job->kernels_.emplace(std::move(source.name), kernel);
  }
  if (made.empty()) return job;
  Settings settings;
  try {
    settings = Settings::read();
  } catch (const base::Error& error) {
    finish(made, error.what());
    return job;
  }
  const size_t together = std::min(toolchain.most_together(), made.size());
  for (size_t first = 0; first < made.size(); first += together) {
    const auto begin = made.begin() + static_cast<std::ptrdiff_t>(first);
    const size_t count = std::min(together, made.size() - first);
    state.waiting.push_back({&toolchain, std::string(preamble),
                             Kernels(begin, begin + static_cast<std::ptrdiff_t>(count)), settings});
    start_thread();
  }
  return job;
}

std::string cache_problem() {
  const std::lock_guard lock(mutex);
  return state.cache_problem;
}

CacheInfo cache_info() {
  const Settings settings = Settings::read();
  const DiskCache cache(settings.cache_directory, DiskCache::Missing::Accept);
  const DiskCache::Usage usage = cache.usage();
  return {settings.cache_directory, usage.files, usage.bytes, settings.cache_bytes,
          cache.problem()};
}

void clear_cache() {
  const Settings settings = Settings::read();
  DiskCache(settings.cache_directory, DiskCache::Missing::Accept).clear();
}

}  // namespace acc::jit
