#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "lazy/graph/words.h"
#include "tests/cpp/kernel_builder.h"
#include "tests/cuda_emulator/emulator.h"
#include "tests/cuda_emulator/guarded.h"

// Calls of kernels in both dialects: the host's, and CUDA's in the emulator.
namespace acc::testing {

namespace dtype = graph::dtype;

// A kernel with memory: each operand has its own, which ends with the last that its strides reach.
struct Call {
  codegen::KernelSpec kernel;
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // per operand, then per position
  std::vector<int64_t> numbers;
  std::vector<int64_t> first;  // per operand, elements from a whole word to its first; none: 0
  double bound = 0;            // relative, of floats; 0: the same bits
  uint32_t room = ~0U;         // bytes of a block's memory, at most

  size_t bytes_of(size_t i) const { return graph::element_bytes(kernel.operands[i].dtype); }
  // Where its first element is from a whole word. Whole words of neighbours end with the memory, so
  // that where it ends at a page they begin in their place, too.
  size_t place(size_t i) const {
    const size_t bytes = first.empty() ? 0 : static_cast<size_t>(first[i]) * bytes_of(i);
    return bytes % Guarded::kWord == 0 ? Guarded::kAnywhere : bytes % Guarded::kWord;
  }
  size_t elements(size_t i) const {
    int64_t last = 0;
    for (size_t loop = 0; loop < sizes.size(); ++loop) last += (sizes[loop] - 1) * strides[i][loop];
    return static_cast<size_t>(last + 1);
  }
  int64_t kept_elements() const {
    int64_t count = 1;
    for (size_t loop = 0; loop < sizes.size(); ++loop) {
      const bool columns = kernel.columns && loop + 1 == sizes.size();
      const size_t kept = sizes.size() - kernel.reduced - (kernel.columns ? 1 : 0);
      if (loop < kept || columns) count *= sizes[loop];
    }
    return count;
  }
  std::vector<int64_t> geometry() const {
    std::vector<int64_t> words = sizes;
    for (const auto& each : strides) words.insert(words.end(), each.begin(), each.end());
    return words;
  }
};

using Memory = std::vector<std::unique_ptr<Guarded>>;

inline void put(char* at, uint8_t type, int number) {
  const auto store = [&](auto value) { memcpy(at, &value, sizeof value); };
  const auto whole = static_cast<float>(number);
  uint32_t bits = 0;
  memcpy(&bits, &whole, sizeof bits);
  switch (type) {
    case dtype::kF32:
      return store(whole / 4);
    case dtype::kF64:
      return store(static_cast<double>(number) / 4);
    case dtype::kI32:
      return store(int32_t{number});
    case dtype::kI64:
      return store(int64_t{number});
    case dtype::kI16:
      return store(static_cast<int16_t>(number));
    case dtype::kBF16:
      return store(static_cast<uint16_t>(bits >> 16));
    case dtype::kF16:  // of its bits, without infinities and NaN
      return store(static_cast<uint16_t>(number * 1234 & 0xbbff));
    case dtype::kBool:
      return store(static_cast<uint8_t>(number > 0));
    default:
      return store(static_cast<int8_t>(number));
  }
}

inline Memory make_memory(const Call& call, Guarded::Page page = Guarded::Page::kBehind) {
  std::mt19937 random(7);
  Memory memory;
  for (size_t i = 0; i < call.kernel.operands.size(); ++i) {
    const size_t bytes = call.bytes_of(i);
    const auto& made = memory.emplace_back(std::make_unique<Guarded>(
        "operand " + std::to_string(i), call.elements(i) * bytes, page, call.place(i)));
    for (size_t k = 0; k < call.elements(i); ++k) {
      put(made->data() + k * bytes, call.kernel.operands[i].dtype,
          static_cast<int>(random() % 33) - 16);
    }
  }
  return memory;
}

inline std::vector<char*> pointers_of(const Memory& memory) {
  std::vector<char*> pointers;
  for (const auto& each : memory) pointers.push_back(each->data());
  return pointers;
}

template <class T>
bool are_close(const char* a, const char* b, double bound) {
  T x;
  T y;
  memcpy(&x, a, sizeof x);
  memcpy(&y, b, sizeof y);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return x == y || std::abs(x - y) <= bound * std::abs(y);
}

inline void expect_same(const Call& call, const Memory& made, const Memory& expected,
                        const char* what) {
  for (size_t i = 0; i < made.size(); ++i) {
    const uint8_t type = call.kernel.operands[i].dtype;
    ASSERT_TRUE(made[i]->is_intact()) << what << ", around operand " << i;
    if (call.bound == 0 || (type != dtype::kF32 && type != dtype::kF64)) {
      ASSERT_TRUE(*made[i] == *expected[i])
          << what << ", operand " << i << " of " << codegen::render_cuda(call.kernel).text;
      continue;
    }
    for (size_t at = 0; at < made[i]->size(); at += call.bytes_of(i)) {
      const char* a = made[i]->data() + at;
      const char* b = expected[i]->data() + at;
      ASSERT_TRUE(type == dtype::kF32 ? are_close<float>(a, b, call.bound)
                                      : are_close<double>(a, b, call.bound))
          << what << ", operand " << i << ", byte " << at;
    }
  }
}

inline void run_host(const Call& call, const jit::Job& job, const Memory& memory) {
  const auto host =
      reinterpret_cast<codegen::HostFunction>(job.function(codegen::render_host(call.kernel).name));
  host(pointers_of(memory).data(), call.geometry().data(), call.numbers.data(), 0,
       call.kept_elements());
}

inline codegen::KernelText text_of(const Call& call) {
  return codegen::render_cuda(call.kernel, codegen::has_parts(call.kernel, call.sizes));
}

// Calls of one kernel whose blocks have the same threads.
class Launches {
 public:
  Launches(const std::vector<Call>& calls, const std::vector<std::vector<char*>>& pointers,
           Guarded::Page page = Guarded::Page::kBehind) {
    const codegen::KernelSpec& kernel = calls.front().kernel;
    std::vector<std::span<const int64_t>> sizes;
    for (const Call& call : calls) sizes.emplace_back(call.sizes);
    const std::vector<codegen::CudaCalls> made = codegen::cuda_launches(kernel, sizes, 2);
    EXPECT_EQ(made.size(), 1U);
    made_ = made.front();
    made_.launch.shared = std::min(made_.launch.shared, calls.front().room);
    std::vector<long> table(made_.first_blocks.begin(), made_.first_blocks.end());
    for (size_t i = 0; i < calls.size(); ++i) {
      for (char* pointer : pointers[i]) table.push_back(reinterpret_cast<long>(pointer));
      const std::vector<int64_t> geometry = calls[i].geometry();
      table.insert(table.end(), geometry.begin(), geometry.end());
      table.insert(table.end(), calls[i].numbers.begin(), calls[i].numbers.end());
      if (kernel.reduced == 0) continue;
      const codegen::CudaParts parts = made_.parts[i];
      const size_t bytes = codegen::cuda_work_words(kernel, sizes[i], parts) * sizeof(long);
      const auto& work =
          work_.emplace_back(std::make_unique<Guarded>("what blocks leave", bytes, page));
      memset(work->data(), 0xff, bytes);  // NaN
      table.push_back(reinterpret_cast<long>(work->data()));
      table.push_back(parts.outer);
      table.push_back(parts.inner);
    }
    table_ = std::make_unique<Guarded>("the table", table.size() * sizeof(long), page);
    memcpy(table_->data(), table.data(), table_->size());
  }

  void run(const EmulatedKernels& kernels, const std::string& name, bool backwards = false) const {
    const auto calls = static_cast<int>(made_.calls.size());
    const int first = made_.stages == 0 ? codegen::kAtOnce : 0;
    const auto* const table = reinterpret_cast<const long*>(table_->data());
    for (int stage = first; stage < made_.stages; ++stage) {
      kernels.run(name, made_.launch, table, calls, stage, backwards);
    }
    for (const auto& each : work_) EXPECT_TRUE(each->is_intact());
  }

 private:
  codegen::CudaCalls made_;
  std::unique_ptr<Guarded> table_;
  Memory work_;
};

// What the emulator makes of a call: threads go one way, with a page right behind all memory; or
// the other way, with one right before it.
inline Memory run_emulated(const Call& call, const EmulatedKernels& kernels, bool backwards) {
  const Guarded::Page page = backwards ? Guarded::Page::kBefore : Guarded::Page::kBehind;
  Memory memory = make_memory(call, page);
  Launches({call}, {pointers_of(memory)}, page).run(kernels, text_of(call).name, backwards);
  return memory;
}

// Both dialects of all calls, compiled together; the threads of a block in either order.
inline void check(const std::vector<Call>& calls) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  std::vector<codegen::KernelText> texts;
  std::vector<jit::Source> sources;
  for (const Call& call : calls) {
    const codegen::KernelText text = text_of(call);
    const auto same = [&](const codegen::KernelText& other) { return other.name == text.name; };
    if (std::ranges::any_of(texts, same)) continue;
    texts.push_back(text);
    const codegen::KernelText host = codegen::render_host(call.kernel);
    sources.push_back({host.name, host.text});
  }
  const EmulatedKernels emulated(texts);
  const auto job = jit::compile(codegen::host_preamble(), sources);
  job->wait();
  ASSERT_EQ(job->error(), "");
  for (const Call& call : calls) {
    const Memory expected = make_memory(call);
    run_host(call, *job, expected);
    for (const bool backwards : {false, true}) {
      const Memory made = run_emulated(call, emulated, backwards);
      expect_same(call, made, expected, backwards ? "backwards" : "forwards");
    }
  }
}

}  // namespace acc::testing
