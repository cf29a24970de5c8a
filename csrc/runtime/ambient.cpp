#include "csrc/runtime/ambient.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <immintrin.h>

#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "csrc/base/env.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"

namespace acc::runtime {
namespace {

// Bit positions. What comes after kForProducts is present only when that is set.
constexpr int kDefaultDtype = 0;  // 8 bits
constexpr int kThreads = 8;       // 16 bits
constexpr int kDeterministic = 24;
constexpr int kWarnOnly = 25;
constexpr int kFillUninitialized = 26;
constexpr int kCudnn = 27;
constexpr int kCudnnBenchmark = 28;
constexpr int kCudnnDeterministic = 29;
constexpr int kMkldnn = 30;
constexpr int kMkldnnDeterministic = 31;
constexpr int kFp16Reduction = 32;  // 2 bits
constexpr int kBf16Reduction = 34;  // 2 bits
constexpr int kFp16Accumulation = 36;
constexpr int kFlushDenormal = 37;
constexpr int kForProducts = 38;
constexpr int kGradMode = 39;
constexpr int kPrecision = 40;  // 2 bits each

struct PrecisionSlot {
  at::Float32Backend backend;
  at::Float32Op op;
};
constexpr std::array<PrecisionSlot, 6> kPrecisionSlots{{
    {at::Float32Backend::CUDA, at::Float32Op::CONV},
    {at::Float32Backend::CUDA, at::Float32Op::RNN},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
}};

// The MXCSR bits flush-to-zero and denormals-are-zero, which at::set_flush_denormal sets together.
constexpr unsigned kFlushBits = 0x8040;

uint64_t bit(bool value, int position) { return static_cast<uint64_t>(value) << position; }
bool test(uint64_t word, int position) { return (word >> position & 1) != 0; }
uint64_t field(uint64_t word, int position, int bits) {
  return word >> position & ((uint64_t{1} << bits) - 1);
}

void set_reduction(uint64_t option, void (at::Context::*set)(bool, bool)) {
  const auto choice = static_cast<at::CuBLASReductionOption>(option);
  const bool reduced = choice == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const bool split = choice != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
  (at::globalContext().*set)(reduced, split);
}

void apply(uint64_t from, uint64_t to) {
  at::Context& context = at::globalContext();
  const uint64_t changed = from ^ to;
  if (field(changed, kDefaultDtype, 8) != 0) {
    c10::set_default_dtype(
        c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(field(to, kDefaultDtype, 8))));
  }
  if (field(changed, kThreads, 16) != 0) {
    at::set_num_threads(static_cast<int>(field(to, kThreads, 16)));
  }
  if (test(changed, kDeterministic) || test(changed, kWarnOnly)) {
    context.setDeterministicAlgorithms(test(to, kDeterministic), test(to, kWarnOnly));
  }
  if (test(changed, kFillUninitialized)) {
    context.setDeterministicFillUninitializedMemory(test(to, kFillUninitialized));
  }
  if (test(changed, kCudnn)) context.setUserEnabledCuDNN(test(to, kCudnn));
  if (test(changed, kCudnnBenchmark)) context.setBenchmarkCuDNN(test(to, kCudnnBenchmark));
  if (test(changed, kCudnnDeterministic)) {
    context.setDeterministicCuDNN(test(to, kCudnnDeterministic));
  }
  if (test(changed, kMkldnn)) context.setUserEnabledMkldnn(test(to, kMkldnn));
  if (test(changed, kMkldnnDeterministic)) {
    context.setDeterministicMkldnn(test(to, kMkldnnDeterministic));
  }
  if (field(changed, kFp16Reduction, 2) != 0) {
    set_reduction(field(to, kFp16Reduction, 2), &at::Context::setAllowFP16ReductionCuBLAS);
  }
  if (field(changed, kBf16Reduction, 2) != 0) {
    set_reduction(field(to, kBf16Reduction, 2), &at::Context::setAllowBF16ReductionCuBLAS);
  }
  if (test(changed, kFp16Accumulation)) {
    context.setAllowFP16AccumulationCuBLAS(test(to, kFp16Accumulation));
  }
  if (test(changed, kFlushDenormal)) context.setFlushDenormal(test(to, kFlushDenormal));
  if (test(changed, kGradMode)) c10::GradMode::set_enabled(test(to, kGradMode));
  for (size_t i = 0; i < kPrecisionSlots.size(); ++i) {
    const int position = kPrecision + 2 * static_cast<int>(i);
    if (field(changed, position, 2) == 0) continue;
    const auto [library, op] = kPrecisionSlots[i];
    const auto wanted = static_cast<at::Float32Precision>(field(to, position, 2));
    // An operator without a precision of its own has that of its backend. Which of the two was read
    // cannot be told; inherited, it goes on following the backend's.
    context.setFloat32Precision(library, op, at::Float32Precision::NONE);
    if (context.float32Precision(library, op) != wanted) {
      context.setFloat32Precision(library, op, wanted);
    }
  }
}

constexpr uint64_t mask(int position, int bits) { return ((uint64_t{1} << bits) - 1) << position; }

// These belong to the thread; the others to the process. Setting the number of threads also sets
// the one that new threads begin with.
constexpr uint64_t kOfThreadAlone = mask(kFlushDenormal, 1) | mask(kGradMode, 1);
constexpr uint64_t kOfThread = kOfThreadAlone | mask(kThreads, 16);

constexpr uint64_t kWithoutProducts = mask(0, kForProducts);

// The settings of the process that plans share, or that one has to itself.
struct Process {
  // Held by every plan while it runs: alone by one that changes settings.
  std::shared_mutex plans;
  // Passed on the way to `plans`: while a plan waits to have it alone, no other comes in.
  std::mutex turn;
  // Odd while a plan has settings of its own in force; changes when it begins and ends.
  std::atomic<uint64_t> epoch{0};
  // Guards a change of the settings by such a plan, and what follows. Nobody waits for it long.
  std::mutex change;
  uint64_t before = 0;  // what the plan found
  uint64_t own = 0;     // what it has brought into force
};

Process& process() {
  static auto& state = *new Process;
  return state;
}

// Whether this thread has a scope: it must not wait for itself.
thread_local bool in_scope = false;

// `now`, but for the settings in which it is still what a plan made it, `own`: these from `before`.
uint64_t without(uint64_t now, uint64_t own, uint64_t before) {
  uint64_t result = now;
  const auto restore = [&](int position, int bits) {
    const uint64_t changed = mask(position, bits);
    if (((now ^ own) & changed) == 0) result = (result & ~changed) | (before & changed);
  };
  restore(kDefaultDtype, 8);
  // Who sets one of these sets both.
  restore(kDeterministic, 2);
  for (int position = kFillUninitialized; position <= kMkldnnDeterministic; ++position) {
    restore(position, 1);
  }
  restore(kFp16Reduction, 2);
  restore(kBf16Reduction, 2);
  restore(kFp16Accumulation, 1);
  for (size_t i = 0; i < kPrecisionSlots.size(); ++i) {
    restore(kPrecision + 2 * static_cast<int>(i), 2);
  }
  return result;
}

// The word with every part: what operators that do not multiply leave open is as in `base`.
uint64_t complete(uint64_t word, uint64_t base) {
  return test(word, kForProducts) ? word : (word & kWithoutProducts) | (base & ~kWithoutProducts);
}

// The settings as they are. Those of CUDA's libraries count only where they are used.
uint64_t read_word(bool products) {
  static const bool cuda = backend().alias_type() == c10::kCUDA;
  const at::Context& context = at::globalContext();
  uint64_t word = static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << kDefaultDtype |
                  field(static_cast<uint64_t>(at::get_num_threads()), 0, 16) << kThreads |
                  bit(context.deterministicAlgorithms(), kDeterministic) |
                  bit(context.deterministicAlgorithmsWarnOnly(), kWarnOnly) |
                  bit(context.deterministicFillUninitializedMemory(), kFillUninitialized) |
                  bit(context.userEnabledMkldnn(), kMkldnn) |
                  bit(context.deterministicMkldnn(), kMkldnnDeterministic) |
                  bit((_mm_getcsr() & kFlushBits) == kFlushBits, kFlushDenormal);
  if (cuda) {
    word |= bit(context.userEnabledCuDNN(), kCudnn) |
            bit(context.benchmarkCuDNN(), kCudnnBenchmark) |
            bit(context.deterministicCuDNN(), kCudnnDeterministic) |
            static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) << kFp16Reduction |
            static_cast<uint64_t>(context.allowBF16ReductionCuBLAS()) << kBf16Reduction |
            bit(context.allowFP16AccumulationCuBLAS(), kFp16Accumulation);
  }
  if (products) {
    word |= bit(true, kForProducts) | bit(c10::GradMode::is_enabled(), kGradMode);
    for (size_t i = 0; i < kPrecisionSlots.size(); ++i) {
      const auto [library, op] = kPrecisionSlots[i];
      if (library == at::Float32Backend::CUDA && !cuda) continue;
      word |= static_cast<uint64_t>(context.float32Precision(library, op))
              << (kPrecision + 2 * static_cast<int>(i));
    }
  }
  return word;
}

}  // namespace

uint64_t ambient_word(bool products) {
  Process& shared = process();
  const uint64_t epoch = shared.epoch.load(std::memory_order_acquire);
  if (epoch % 2 == 0) {
    const uint64_t word = read_word(products);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (shared.epoch.load(std::memory_order_relaxed) == epoch) return word;
  }
  const LockWithoutGil lock(shared.change);
  const uint64_t word = read_word(products);
  if (shared.epoch.load(std::memory_order_relaxed) % 2 == 0) return word;
  const uint64_t wanted = without(word, shared.own, shared.before);
  return products ? wanted : wanted & kWithoutProducts;
}

bool is_deterministic(uint64_t word) { return test(word, kDeterministic); }

std::optional<bool> gradients_of(uint64_t word) {
  if (!test(word, kForProducts)) return std::nullopt;
  return test(word, kGradMode);
}

std::vector<ChangedSetting> changed_settings(uint64_t before, uint64_t after) {
  std::vector<ChangedSetting> found;
  const uint64_t changed = before ^ after;
  const auto note = [&](const char* name, int position, int bits, const auto& text) {
    if (field(changed, position, bits) == 0) return;
    found.push_back(
        {name, text(field(before, position, bits)), text(field(after, position, bits))});
  };
  const auto dtype = [](uint64_t value) {
    return std::string(c10::toString(static_cast<c10::ScalarType>(value)));
  };
  const auto number = [](uint64_t value) { return std::to_string(value); };
  const auto on_off = [](uint64_t value) { return std::string(value != 0 ? "on" : "off"); };
  const auto precision = [](uint64_t value) {
    return at::precision2str(static_cast<at::Float32Precision>(value));
  };
  note("default dtype", kDefaultDtype, 8, dtype);
  note("number of threads", kThreads, 16, number);
  constexpr std::array<std::pair<int, const char*>, 11> kSwitches{{
      {kDeterministic, "deterministic algorithms"},
      {kWarnOnly, "deterministic algorithms, warn only"},
      {kFillUninitialized, "filling of uninitialized memory"},
      {kCudnn, "cuDNN"},
      {kCudnnBenchmark, "cuDNN's benchmark mode"},
      {kCudnnDeterministic, "cuDNN's deterministic mode"},
      {kMkldnn, "oneDNN"},
      {kMkldnnDeterministic, "oneDNN's deterministic mode"},
      {kFp16Accumulation, "accumulation in float16"},
      {kFlushDenormal, "flushing of denormals"},
      {kGradMode, "grad mode"},
  }};
  for (const auto& [position, name] : kSwitches) note(name, position, 1, on_off);
  note("reduced precision of float16 sums", kFp16Reduction, 2, number);
  note("reduced precision of bfloat16 sums", kBf16Reduction, 2, number);
  for (size_t i = 0; i < kPrecisionSlots.size(); ++i) {
    note("precision of float32 products", kPrecision + 2 * static_cast<int>(i), 2, precision);
  }
  return found;
}

uint64_t ambient_epoch() { return process().epoch.load(std::memory_order_acquire); }

void await_program_settings() {
  if (in_scope || in_bad_fork()) return;
  std::shared_mutex& plans = process().plans;
  if (!plans.try_lock_shared()) {
    const GilRelease release;
    plans.lock_shared();
    plans.unlock_shared();
    return;
  }
  plans.unlock_shared();
}

AmbientScope::AmbientScope() : initial_(read_word(true)) {
  const std::lock_guard turn(process().turn);
  process().plans.lock_shared();
  in_scope = true;
}

AmbientScope::~AmbientScope() {
  in_scope = false;
  Process& shared = process();
  if (!alone_) {
    const uint64_t now = read_word(true);
    apply(now, (now & ~kOfThread) | (initial_ & kOfThread));
    shared.plans.unlock_shared();
    return;
  }
  {
    const std::lock_guard lock(shared.change);
    const uint64_t now = read_word(true);
    apply(now, (without(now, shared.own, shared.before) & ~kOfThread) | (initial_ & kOfThread));
    ++shared.epoch;
  }
  shared.plans.unlock();
}

void AmbientScope::go_alone() {
  Process& shared = process();
  shared.plans.unlock_shared();
  {
    const std::lock_guard turn(shared.turn);
    shared.plans.lock();
  }
  gil_.emplace();
  alone_ = true;
  const std::lock_guard lock(shared.change);
  shared.before = shared.own = read_word(true);
  ++shared.epoch;
}

void AmbientScope::set(uint64_t word) {
  const uint64_t different = word ^ read_word(test(word, kForProducts));
  if (different == 0) return;
  if (!alone_ && (different & ~kOfThreadAlone) == 0) {
    // The process's may have changed by now: they are the program's.
    const uint64_t now = read_word(true);
    apply(now, (now & ~kOfThreadAlone) | (complete(word, now) & kOfThreadAlone));
    return;
  }
  if (!alone_) go_alone();
  Process& shared = process();
  const std::lock_guard lock(shared.change);
  const uint64_t now = read_word(true);
  shared.before = without(now, shared.own, shared.before);
  shared.own = complete(word, now);
  apply(now, shared.own);
}

namespace {

std::atomic<bool>& alike() {
  static std::atomic<bool> value = [] {
    const std::string processes = base::env::foreign("WORLD_SIZE");
    return !processes.empty() && processes != "1";
  }();
  return value;
}

}  // namespace

bool chooses_alike() { return alike(); }

bool choose_alike() { return !alike().exchange(true); }

}  // namespace acc::runtime
