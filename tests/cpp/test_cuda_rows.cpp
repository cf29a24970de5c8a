// What a block holds of its rows from one phase to a later one is what stands in memory.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cpp/emulated_calls.h"

namespace acc {
namespace {

using codegen::KernelSpec;
using codegen::Walk;
using graph::Fn;
using testing::apply;
using testing::Call;
using testing::check;
using testing::EmulatedKernels;
using testing::Memory;
using testing::operand;
namespace dtype = graph::dtype;

uint8_t computed_in(uint8_t type) {
  const bool small = type == dtype::kU8 || type == dtype::kI8 || type == dtype::kI16;
  return small ? dtype::kI32 : dtype::computed_in(type);
}

// out = x - max(x)
KernelSpec below_largest(uint8_t type) {
  const uint8_t made = computed_in(type);
  KernelSpec kernel = testing::reduction(Fn::kAmax, false);
  kernel.operands = {{type, Walk::kContiguous, false}, {made, Walk::kContiguous, true}};
  kernel.instructions = {operand(0, made), apply(Fn::kAmax, made, 0), apply(Fn::kSub, made, 0, 1)};
  kernel.stores = {{1, 2}};
  return kernel;
}

// The same in x's place.
KernelSpec in_place() {
  KernelSpec kernel = below_largest(dtype::kF32);
  kernel.operands = {{dtype::kF32, Walk::kContiguous, true}};
  kernel.stores = {{0, 2}};
  return kernel;
}

// out = y * (g - sum(g * y)): what a softmax's backward computes.
KernelSpec backward(uint8_t type_of_y, uint8_t type_of_g) {
  KernelSpec kernel = testing::reduction(Fn::kSum, false);
  kernel.operands = {{type_of_y, Walk::kContiguous, false},
                     {type_of_g, Walk::kContiguous, false},
                     {dtype::kF64, Walk::kContiguous, true}};
  kernel.instructions = {operand(0, computed_in(type_of_y)), operand(1, computed_in(type_of_g)),
                         apply(Fn::kCast, dtype::kF64, 0),   apply(Fn::kCast, dtype::kF64, 1),
                         apply(Fn::kMul, dtype::kF64, 2, 3), apply(Fn::kSum, dtype::kF64, 4),
                         apply(Fn::kSub, dtype::kF64, 3, 5), apply(Fn::kMul, dtype::kF64, 2, 6)};
  kernel.stores = {{2, 7}};
  return kernel;
}

// h = a + b, out = h - max(h): what a later phase reads is what an earlier one wrote.
KernelSpec residual() {
  KernelSpec kernel = testing::reduction(Fn::kAmax, false);
  kernel.operands = {{dtype::kF32, Walk::kContiguous, false},
                     {dtype::kF32, Walk::kContiguous, false},
                     {dtype::kF32, Walk::kContiguous, true},
                     {dtype::kF32, Walk::kContiguous, true}};
  kernel.instructions = {operand(0), operand(1), apply(Fn::kAdd, dtype::kF32, 0, 1),
                         apply(Fn::kAmax, dtype::kF32, 2), apply(Fn::kSub, dtype::kF32, 2, 3)};
  kernel.stores = {{2, 2}, {3, 4}};
  return kernel;
}

// Of elements that are no words: nothing is held.
KernelSpec strided_softmax() {
  KernelSpec kernel = testing::softmax(false);
  kernel.operands[0].walk = Walk::kStrided;
  return kernel;
}

// The softmax of a + b. No GPU holds more than 14,464 elements of both.
KernelSpec softmax_of_two() {
  KernelSpec kernel = testing::softmax(false);
  kernel.operands.push_back({dtype::kF32, Walk::kContiguous, false});
  kernel.instructions = {operand(0),
                         operand(3),
                         apply(Fn::kAdd, dtype::kF32, 0, 1),
                         apply(Fn::kAmax, dtype::kF32, 2),
                         apply(Fn::kSub, dtype::kF32, 2, 3),
                         apply(Fn::kExp, dtype::kF32, 4),
                         apply(Fn::kSum, dtype::kF32, 5),
                         apply(Fn::kDiv, dtype::kF32, 5, 6)};
  kernel.stores = {{1, 7}, {2, 3}};
  return kernel;
}

// The same where a + b is a result, too: later phases read it.
KernelSpec softmax_of_result() {
  KernelSpec kernel = softmax_of_two();
  kernel.operands.push_back({dtype::kF32, Walk::kContiguous, true});
  kernel.stores.push_back({4, 2});
  return kernel;
}

// Strides of rows that begin so many elements apart; what is kept has one element each.
Call call_of(const KernelSpec& kernel, int64_t rows, int64_t columns, int64_t apart) {
  const bool sums = std::ranges::any_of(
      kernel.instructions, [](const codegen::Instruction& each) { return each.fn == Fn::kSum; });
  Call call{kernel, {rows, columns}, {}, {}, {}, sums ? 1e-5 : 0};
  for (const codegen::Operand& each : kernel.operands) {
    call.strides.push_back(each.kept ? std::vector<int64_t>{1, 0} : std::vector<int64_t>{apart, 1});
  }
  return call;
}

std::vector<KernelSpec> kernels() {
  std::vector<KernelSpec> made{testing::softmax(false), residual(), in_place()};
  for (const uint8_t type : {dtype::kF32, dtype::kF64, dtype::kF16, dtype::kBF16, dtype::kI32,
                             dtype::kI64, dtype::kI16, dtype::kI8, dtype::kU8}) {
    made.push_back(below_largest(type));
  }
  for (const auto& [y, g] : {std::pair{dtype::kF32, dtype::kF32},
                             {dtype::kBF16, dtype::kF32},
                             {dtype::kBool, dtype::kF32},
                             {dtype::kU8, dtype::kI64}}) {
    made.push_back(backward(y, g));
  }
  return made;
}

uint32_t wanted(const Call& call) {
  return codegen::cuda_launch(call.kernel, call.sizes, 2).shared;
}

TEST(CudaRows, OfEveryTypeAndLengthFromEveryPlace) {
  std::vector<Call> calls;
  for (const KernelSpec& kernel : kernels()) {
    for (const auto& [rows, columns] :
         {std::pair<int64_t, int64_t>{3, 1}, {1, 3}, {9, 64}, {5, 100}, {2, 1023}, {2, 4096}}) {
      calls.push_back(call_of(kernel, rows, columns, columns));
      calls.push_back(call_of(kernel, rows, columns, columns + 1));
      calls.push_back(call_of(kernel, rows, columns, columns));
      calls.back().first.assign(kernel.operands.size(), 1);
    }
  }
  check(calls);
}

// As much as there is room for, from nothing to all; what is not held is read again.
TEST(CudaRows, WithEveryRoom) {
  std::vector<Call> calls;
  for (const KernelSpec& kernel : kernels()) {
    for (const int64_t columns : {4096, 4099}) {
      Call call = call_of(kernel, 2, columns, columns);
      const uint32_t all = wanted(call);
      for (const uint32_t room : {64U, 65U, all / 3, all / 2, all - 1, all, all + 1}) {
        call.room = room;
        calls.push_back(call);
      }
    }
  }
  // of a block in the emulator: 3040 slots of 16 bytes
  for (const int64_t columns : {12160, 12161, 16000}) {
    calls.push_back(call_of(testing::softmax(false), 2, columns, columns));
    EXPECT_GT(wanted(calls.back()), testing::emulator::kShared);
  }
  check(calls);
}

// The text with a fault where `from` stands for the first time.
std::string mutate(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// Memory that forgets what was read from it.
std::string forgetful() {
  std::string text = codegen::cuda_preamble();
  const auto plant = [&](const std::string& read, const std::string& forget) {
    text = mutate(text, read, "{ " + read + forget + " }");
  };
  plant("words = *(const Words<T, V>*)p;", "memset((void*)p, 0xff, sizeof words);");
  plant("words.v[e] = p[e];", "memset((void*)(p + e), 0xff, sizeof(T));");
  plant("copy_later(to, from, BYTES);", "copy_now(); memset((void*)from, 0xff, BYTES);");
  return text;
}

bool same_results(const Call& call, const Memory& made, const Memory& expected) {
  bool same = true;
  for (size_t i = 0; i < made.size(); ++i) {
    if (call.kernel.operands[i].stored) same &= *made[i] == *expected[i];
  }
  return same;
}

// Whether the results of a call are right in spite of it.
bool reads_once(const Call& call) {
  const codegen::KernelText text = testing::text_of(call);
  const EmulatedKernels remembers({text});
  const EmulatedKernels forgets({text}, forgetful());
  const Memory expected = run_emulated(call, remembers, false);
  return same_results(call, run_emulated(call, forgets, false), expected);
}

// Shapes of which no thread is without an element.
TEST(CudaRows, ARowIsReadOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  KernelSpec nested = below_largest(dtype::kF32);
  nested.loops = 3;
  nested.reduced = 2;
  const auto call_of_nested = [&](int64_t rows, int64_t columns) {
    return Call{nested,
                {8, rows, columns},
                {{rows * columns, columns, 1}, {rows * columns, columns, 1}},
                {},
                {}};
  };
  for (Call call : {call_of(testing::softmax(false), 2, 4096, 4096),
                    call_of(testing::softmax(false), 8, 61, 61),
                    call_of(testing::softmax(false), 1, 12160, 12160),
                    call_of(residual(), 2, 3001, 3001), call_of(in_place(), 4, 400, 401),
                    call_of(backward(dtype::kBF16, dtype::kF32), 2, 2048, 2048),
                    call_of(below_largest(dtype::kF64), 1, 1000, 1000), call_of_nested(33, 1),
                    call_of_nested(9, 49), call_of_nested(3, 64), call_of_nested(5, 700)}) {
    const std::string what = testing::text_of(call).text;
    EXPECT_TRUE(reads_once(call)) << call.sizes.back() << " elements of\n" << what;
    const uint32_t fits = std::min(wanted(call), testing::emulator::kShared);
    call.room = fits / 2;
    EXPECT_FALSE(reads_once(call)) << call.sizes.back() << " elements of\n" << what;
  }
  EXPECT_FALSE(reads_once(call_of(testing::softmax(false), 1, 12161, 12161)));
}

// What is written first is held where it is written, what is read first was fetched before.
TEST(CudaRows, TheEmulatorSeesWhatIsWrong) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  struct Mutant {
    KernelSpec kernel;
    const char* from;
    const char* to;
  };
  KernelSpec sum = testing::reduction(Fn::kSum, false);
  for (const auto& [kernel, from, to] :
       {Mutant{residual(), "[k * count + at] =", "[k * count + at / 2] ="},
        {residual(), "if (slot < slots) hold", "if (slot < slots / 2) hold"},
        {testing::softmax(false), "\narrive();", ""},
        {testing::softmax(false), "fetch<WHOLE, V>(h0, slots, slot,",
         "fetch<WHOLE, V>(h0, slots, 0,"},
        {strided_softmax(), "move_base(base4, v1, all4, a4);", ""},
        {strided_softmax(), "if (most4 > base4 + SLACK)", "if (false)"},
        {strided_softmax(), "base = to;", ""},
        {strided_softmax(), "part[e] *= factor;", ""},
        {sum, "take<WHOLE>(taken0[u]", "take<WHOLE>(taken0[0]"},
        {sum, "from += U * apart", "from += apart"},
        {sum, "if (at >= end) break;", "if (at + V >= end) break;"}}) {
    for (const int64_t columns : {4096, 5004}) {
      const Call call = call_of(kernel, 2, columns, columns);
      const codegen::KernelText right = testing::text_of(call);
      const std::string text = codegen::cuda_preamble() + right.text;
      const auto result_of = [&](const std::string& text) {
        return run_emulated(call, EmulatedKernels({{right.name, text}}, ""), false);
      };
      const Memory expected = result_of(text);
      bool seen = true;
      try {
        seen = !same_results(call, result_of(mutate(text, from, to)), expected);
      } catch (const std::runtime_error&) {
        // it has touched what is nobody's
      }
      EXPECT_TRUE(seen) << from << " -> " << to;
    }
  }
}

// Sums that run along, in rows that no block holds.
TEST(CudaRows, ASumRunsAlong) {
  std::vector<Call> calls;
  for (const int64_t columns : {1, 5, 101, 4099}) {
    calls.push_back(call_of(strided_softmax(), 3, columns, columns));
  }
  for (const KernelSpec& kernel : {softmax_of_two(), softmax_of_result()}) {
    for (const int64_t columns : {14464, 14465, 16003}) {
      Call call = call_of(kernel, 2, columns, columns);
      for (const uint32_t room : {64U, 32U << 10, ~0U}) {
        call.room = room;
        calls.push_back(call);
      }
    }
  }
  check(calls);
}

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// Whether a call reads memory so often, by words or where `read` stands in its text, and not more.
bool reads(const Call& call, int64_t count, const std::string& read = "*(const Words<T, V>*)p") {
  const codegen::KernelText right = testing::text_of(call);
  const std::string all = codegen::cuda_preamble() + right.text;
  const auto runs_with = [&](int64_t allowed) {
    const std::string counted = "static long allowed = " + std::to_string(allowed) +
                                "; template <class T> T& counted(T& read) {"
                                "if (--allowed < 0) *(volatile int*)nullptr = 0; return read; }";
    const std::string text = counted + replace_all(all, read, "counted(" + read + ")");
    try {
      run_emulated(call, EmulatedKernels({{right.name, text}}, ""), false);
      return true;
    } catch (const std::runtime_error&) {
      return false;
    }
  };
  return runs_with(count) && !runs_with(count - 1);
}

// A row that is not held is read for its largest element, its sum and its result; one that no GPU
// holds is read for both of the first at once.
TEST(CudaRows, ARowIsReadOnceForItsLargestElementAndItsSum) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  const auto two = [](int64_t columns) {
    Call call = call_of(softmax_of_two(), 1, columns, columns);
    call.room = 64;  // nothing is held
    return call;
  };
  EXPECT_TRUE(reads(two(16000), 2 * (2 * 16000 / 4)));
  EXPECT_TRUE(reads(two(14464), 3 * (2 * 14464 / 4)));
  const Call columns{testing::softmax(true), {50, 64}, {{64, 1}, {64, 1}, {0, 1}}, {}, {}};
  EXPECT_TRUE(reads(columns, 2 * (50 * 64), "p0[column]"));
}

// Rows of fewer words than a thread asks for at once, of as many, and of more, by one or by many.
TEST(CudaRows, OfSeveralTurnsAtOnce) {
  std::vector<Call> calls;
  for (const uint8_t type : {dtype::kF32, dtype::kF64, dtype::kBF16, dtype::kI32, dtype::kU8}) {
    const uint8_t made = computed_in(type);
    KernelSpec largest = testing::reduction(Fn::kAmax, false);
    largest.operands[0].dtype = type;
    largest.operands[1].dtype = made;
    largest.instructions = {operand(0, made), apply(Fn::kAmax, made, 0)};
    // sum(a * b): two turns at once where they are of four bytes
    KernelSpec product = testing::reduction(Fn::kSum, false);
    product.operands = {{type, Walk::kContiguous, false},
                        {type, Walk::kContiguous, false},
                        {made, Walk::kContiguous, true, true}};
    product.instructions = {operand(0, made), operand(1, made), apply(Fn::kMul, made, 0, 1),
                            apply(Fn::kSum, made, 2)};
    product.stores = {{2, 3}};
    for (const KernelSpec& kernel : {largest, product}) {
      for (const int64_t columns : {8, 128, 136, 1024, 2048, 2056, 3080, 4104, 5000, 8200, 16392}) {
        calls.push_back(call_of(kernel, 3, columns, columns));
        calls.push_back(call_of(kernel, 3, columns + 1, columns + 8));
      }
    }
  }
  // a GPU full of rows
  calls.push_back(call_of(testing::softmax(false), 8000, 136, 136));
  check(calls);
}

TEST(CudaRows, ThreadsOfARow) {
  const auto of = [](const KernelSpec& kernel, const std::vector<int64_t>& sizes) {
    return codegen::cuda_launch(kernel, sizes, 132).x;
  };
  EXPECT_EQ(of(testing::softmax(false), {70, 1024}), 256U);  // a word each
  EXPECT_EQ(of(testing::softmax(false), {1024, 1024}), 256U);
  EXPECT_EQ(of(testing::softmax(false), {16384, 1024}), 64U);  // four words each
  EXPECT_EQ(of(testing::softmax(false), {16384, 768}), 64U);
  EXPECT_EQ(of(testing::softmax(false), {16384, 50304}), 256U);
  EXPECT_EQ(of(testing::softmax(false), {16384, 100}), 32U);
  EXPECT_EQ(of(backward(dtype::kBF16, dtype::kF32), {16384, 1024}), 64U);
  EXPECT_EQ(of(backward(dtype::kF32, dtype::kF32), {16384, 1024}), 128U);  // two of two operands
  EXPECT_EQ(of(testing::reduction(Fn::kSum, false), {16384, 1024}), 64U);
}

TEST(CudaRows, NoBlockWritesBehindItsMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  Call call = call_of(testing::softmax(false), 2, 4096, 4096);
  call.room = wanted(call) / 2;
  codegen::KernelText text = testing::text_of(call);
  text.text = mutate(text.text, "(shared_bytes() - 64)", "(shared_bytes() + 4096)");
  EXPECT_THROW(run_emulated(call, EmulatedKernels({text}), false), std::runtime_error);
}

TEST(CudaRows, ABlockAsksForWhatItsRowsHave) {
  EXPECT_EQ(codegen::cuda_launch(testing::scale(), std::vector<int64_t>{9000}, 2).shared, 0U);
  const auto of = [](const KernelSpec& kernel, const std::vector<int64_t>& sizes) {
    return codegen::cuda_launch(kernel, sizes, 2).shared;
  };
  EXPECT_EQ(of(testing::reduction(Fn::kSum, false), {70, 1000}), 64U);  // read once as it is
  EXPECT_EQ(of(testing::softmax(true), {70, 1000}), 4096U);
  EXPECT_EQ(of(testing::softmax(false), {70, 1000}), 64U + 4 * 1024);
  EXPECT_EQ(of(testing::softmax(false), {70, 10}), 64U + 4 * 1024);  // several rows of a block
  EXPECT_EQ(of(testing::softmax(false), {70, 1025}), 64U + 8 * 1024);
  EXPECT_EQ(of(below_largest(dtype::kBF16), {70, 4096}), 64U + 8 * 1024);
  EXPECT_EQ(of(below_largest(dtype::kF64), {70, 4096}), 64U + 32 * 1024);
  EXPECT_EQ(of(backward(dtype::kBF16, dtype::kF32), {70, 4096}), 64U + 24 * 1024);
  EXPECT_EQ(of(testing::softmax(false), {500, 50304}), 64U + 50 * 4096);
  EXPECT_EQ(of(testing::softmax(false), {5000, 1 << 30}), 256U << 10);
  EXPECT_EQ(of(testing::softmax(false), {2, 70000}), 64U);  // in parts, stage by stage

  const std::vector<std::vector<int64_t>> sizes{{70, 9000}, {70, 16000}, {70, 5000}};
  const std::vector<codegen::CudaCalls> made =
      codegen::cuda_launches(testing::softmax(false), {sizes.begin(), sizes.end()}, 2);
  ASSERT_EQ(made.size(), 1U);
  EXPECT_EQ(made[0].launch.shared, of(testing::softmax(false), sizes[1]));
}

}  // namespace
}  // namespace acc
