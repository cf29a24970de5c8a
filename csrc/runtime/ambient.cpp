#include "csrc/runtime/ambient.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <immintrin.h>

#include <array>
#include <condition_variable>
#include <mutex>

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
    context.setFloat32Precision(kPrecisionSlots[i].backend, kPrecisionSlots[i].op,
                                static_cast<at::Float32Precision>(field(to, position, 2)));
  }
}

constexpr uint64_t mask(int position, int bits) { return ((uint64_t{1} << bits) - 1) << position; }

// These belong to the thread; the others to the process.
constexpr uint64_t kOfThread = mask(kThreads, 16) | mask(kFlushDenormal, 1) | mask(kGradMode, 1);

// What the running plans have brought into force for the process.
struct InForce {
  std::mutex mutex;
  std::condition_variable ended;
  size_t threads = 0;   // that rely on it
  uint64_t word = 0;    // meaningful while there are any, like `before`
  uint64_t before = 0;  // what the first of them found
};

InForce& in_force() {
  static auto& state = *new InForce;
  return state;
}

thread_local size_t relying_scopes = 0;

}  // namespace

uint64_t ambient_word(bool products) {
  const at::Context& context = at::globalContext();
  uint64_t word = static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << kDefaultDtype |
                  field(static_cast<uint64_t>(at::get_num_threads()), 0, 16) << kThreads |
                  bit(context.deterministicAlgorithms(), kDeterministic) |
                  bit(context.deterministicAlgorithmsWarnOnly(), kWarnOnly) |
                  bit(context.deterministicFillUninitializedMemory(), kFillUninitialized) |
                  bit(context.userEnabledCuDNN(), kCudnn) |
                  bit(context.benchmarkCuDNN(), kCudnnBenchmark) |
                  bit(context.deterministicCuDNN(), kCudnnDeterministic) |
                  bit(context.userEnabledMkldnn(), kMkldnn) |
                  bit(context.deterministicMkldnn(), kMkldnnDeterministic) |
                  static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) << kFp16Reduction |
                  static_cast<uint64_t>(context.allowBF16ReductionCuBLAS()) << kBf16Reduction |
                  bit(context.allowFP16AccumulationCuBLAS(), kFp16Accumulation) |
                  bit((_mm_getcsr() & kFlushBits) == kFlushBits, kFlushDenormal);
  if (products) {
    word |= bit(true, kForProducts) | bit(c10::GradMode::is_enabled(), kGradMode);
    for (size_t i = 0; i < kPrecisionSlots.size(); ++i) {
      word |= static_cast<uint64_t>(
                  context.float32Precision(kPrecisionSlots[i].backend, kPrecisionSlots[i].op))
              << (kPrecision + 2 * static_cast<int>(i));
    }
  }
  return word;
}

AmbientScope::AmbientScope() : initial_(ambient_word(true)), current_(initial_) {}

AmbientScope::~AmbientScope() {
  if (!relies_) return;
  if (relying_scopes > 1) {
    bring(initial_);
    --relying_scopes;
    return;
  }
  InForce& process = in_force();
  std::lock_guard lock(process.mutex);
  relying_scopes = 0;
  const uint64_t of_process = --process.threads == 0 ? process.before : process.word;
  const uint64_t to = (initial_ & kOfThread) | of_process;
  if (to != current_) {
    // What another thread has set meanwhile stays.
    const uint64_t now = ambient_word(true);
    apply(now, (now & (now ^ current_)) | (to & ~(now ^ current_)));
  }
  process.ended.notify_all();
}

void AmbientScope::set(uint64_t word) {
  if (!test(word, kForProducts)) {
    constexpr uint64_t kLow = (uint64_t{1} << kForProducts) - 1;
    word = (word & kLow) | (current_ & ~kLow);
  }
  if (relies_ && word == current_) return;
  bring(word);
}

void AmbientScope::bring(uint64_t word) {
  InForce& process = in_force();
  std::unique_lock lock(process.mutex);
  const uint64_t wanted = word & ~kOfThread;
  process.ended.wait(lock, [&] {
    const size_t others = process.threads - (relying_scopes > 0 ? 1 : 0);
    return others == 0 || wanted == process.word;
  });
  if (!relies_) {
    if (relying_scopes++ == 0 && process.threads++ == 0) {
      process.word = process.before = ambient_word(true) & ~kOfThread;
    }
    relies_ = true;
  }
  apply((current_ & kOfThread) | process.word, word);
  process.word = wanted;
  current_ = word;
}

}  // namespace acc::runtime
