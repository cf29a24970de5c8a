// The CUDA dialect computes what the host's does: the same kernels, run by the emulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <regex>
#include <set>

#include "tests/cpp/emulated_calls.h"

namespace acc {
namespace {

using codegen::Instruction;
using codegen::KernelSpec;
using codegen::Walk;
using graph::Fn;
using testing::apply;
using testing::Call;
using testing::check;
using testing::constant;
using testing::expect_same;
using testing::Launches;
using testing::make_memory;
using testing::Memory;
using testing::operand;
using testing::pointers_of;
using testing::position;
using testing::run_emulated;
using testing::run_host;
using testing::scalar;
using testing::scale;
using testing::text_of;
namespace dtype = graph::dtype;

TEST(CudaKernels, EveryLengthFromEveryPlace) {
  std::vector<Call> calls;
  for (const int64_t n : {1, 2, 3, 4, 5, 63, 64, 255, 1024, 1028, 9000, 9001}) {
    for (const int64_t first : {0, 1, 4}) {
      calls.push_back({scale(), {n}, {{1}, {1}}, {std::bit_cast<int64_t>(3.0)}, {first, 0}});
      calls.push_back({scale(), {n}, {{1}, {1}}, {std::bit_cast<int64_t>(3.0)}, {0, first}});
    }
  }
  check(calls);
}

TEST(CudaKernels, NeighboursOfManyOperandsAreFewer) {
  std::vector<Call> calls;
  for (const auto& [operands, neighbours] : {std::pair{16, 4}, {17, 2}, {33, 1}}) {
    KernelSpec kernel;
    kernel.instructions = {operand(0)};
    kernel.operands = {{dtype::kF32, Walk::kContiguous, false}};
    std::vector<std::vector<int64_t>> strides = {{1}};
    for (uint32_t i = 1; i < static_cast<uint32_t>(operands); ++i) {
      kernel.operands.push_back({dtype::kF32, Walk::kContiguous, true});
      kernel.instructions.push_back(apply(Fn::kAdd, dtype::kF32, 0, i - 1));
      kernel.stores.push_back({i, i});
      strides.push_back({1});
    }
    const std::string line = "constexpr int V = " + std::to_string(neighbours) + ";";
    EXPECT_NE(codegen::render_cuda(kernel).text.find(line), std::string::npos) << line;
    for (const int64_t n : {400, 403}) calls.push_back({kernel, {n}, strides, {}, {}});
  }
  check(calls);
}

TEST(CudaKernels, RowsWithBroadcastAndStridedOperands) {
  const KernelSpec kernel = testing::broadcast_and_strided();
  std::vector<Call> calls;
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{5, 37}, {36, 8}, {1, 64}}) {
    calls.push_back({kernel,
                     {rows, columns},
                     {{columns, 1}, {0, 1}, {1, 0}, {1, rows}, {2 * columns, 2}},
                     {},
                     {}});
    // rows that begin at no whole word
    calls.push_back({kernel,
                     {rows, columns},
                     {{columns + 1, 1}, {0, 1}, {1, 0}, {1, rows}, {2 * columns, 2}},
                     {},
                     {}});
  }
  check(calls);
}

TEST(CudaKernels, TypesAreReadRoundedAndWritten) {
  std::vector<Call> calls;
  for (const uint8_t from : {dtype::kF32, dtype::kF64, dtype::kF16, dtype::kBF16, dtype::kI32,
                             dtype::kI64, dtype::kI16, dtype::kI8, dtype::kU8, dtype::kBool}) {
    for (const uint8_t to : {dtype::kF32, dtype::kF64, dtype::kF16, dtype::kBF16, dtype::kI32,
                             dtype::kI64, dtype::kBool}) {
      const auto computed = [](uint8_t type) {
        const bool small = type == dtype::kU8 || type == dtype::kI8 || type == dtype::kI16;
        return small ? dtype::kI32 : dtype::computed_in(type);
      };
      KernelSpec kernel;
      kernel.operands = {{from, Walk::kContiguous, false}, {to, Walk::kContiguous, true}};
      kernel.instructions = {operand(0, computed(from))};
      if (computed(from) != computed(to)) {
        kernel.instructions.push_back(apply(Fn::kCast, computed(to), 0));
      }
      kernel.stores = {{1, static_cast<uint32_t>(kernel.instructions.size() - 1)}};
      calls.push_back({kernel, {403}, {{1}, {1}}, {}, {}});
      calls.push_back({kernel, {400}, {{1}, {1}}, {}, {}});
    }
  }
  check(calls);
}

TEST(CudaKernels, PositionsCount) {
  KernelSpec kernel;
  kernel.loops = 2;
  kernel.operands = {{dtype::kF32, Walk::kContiguous, true},
                     {dtype::kF32, Walk::kContiguous, true}};
  kernel.positions = {{Walk::kContiguous, false}, {Walk::kBroadcast, false}};
  kernel.instructions = {position(0), position(1)};
  kernel.stores = {{0, 0}, {1, 1}};
  check({{kernel, {6, 20}, {{20, 1}, {20, 1}, {0, 1}, {1, 0}}, {}, {}},
         {kernel, {6, 21}, {{21, 1}, {21, 1}, {0, 1}, {1, 0}}, {}, {}}});
}

TEST(CudaKernels, FunctionsAreThoseOfTheHost) {
  std::vector<Call> calls;
  for (Fn fn = Fn::kSqrt; fn <= Fn::kRound; fn = static_cast<Fn>(static_cast<int>(fn) + 1)) {
    KernelSpec kernel;
    kernel.operands = {{dtype::kF32, Walk::kContiguous, false},
                       {dtype::kF32, Walk::kContiguous, true}};
    kernel.instructions = {operand(0), apply(fn, dtype::kF32, 0)};
    kernel.stores = {{1, 1}};
    calls.push_back({kernel, {100}, {{1}, {1}}, {}, {}, 4e-7});
  }
  check(calls);
}

TEST(CudaKernels, ArithmeticAndTruth) {
  std::vector<Call> calls;
  for (Fn fn = Fn::kAdd; fn <= Fn::kSelect; fn = static_cast<Fn>(static_cast<int>(fn) + 1)) {
    for (const uint8_t type : {dtype::kF32, dtype::kF64, dtype::kI32, dtype::kI64, dtype::kBool}) {
      const bool floating = dtype::is_floating(type);
      const bool bits = fn >= Fn::kAnd && fn <= Fn::kNot;
      // truths are compared as numbers, but for equality
      const bool of_truths = bits || fn == Fn::kEq || fn == Fn::kNe || fn == Fn::kSelect;
      if (type == dtype::kBool ? !of_truths : bits && floating) continue;
      if ((fn == Fn::kDiv && !floating) || (fn == Fn::kPow && type != dtype::kF32)) continue;
      KernelSpec kernel;
      const bool truth = graph::is_comparison(fn);
      kernel.operands = {{type, Walk::kContiguous, false},
                         {type, Walk::kContiguous, false},
                         {fn == Fn::kSelect ? dtype::kBool : type, Walk::kContiguous, false},
                         {truth ? dtype::kBool : type, Walk::kContiguous, true}};
      kernel.instructions = {operand(0, type), operand(1, type),
                             operand(2, fn == Fn::kSelect ? dtype::kBool : type)};
      const uint8_t made = truth ? dtype::kBool : type;
      kernel.instructions.push_back(fn == Fn::kSelect ? apply(fn, made, 2, 0, 1)
                                                      : apply(fn, made, 0, 1, 2));
      kernel.stores = {{3, 3}};
      calls.push_back({kernel, {100}, {{1}, {1}, {1}, {1}}, {}, {}, fn == Fn::kPow ? 4e-7 : 0});
    }
  }
  check(calls);
}

// The sum of (x - sum(x))^2: a sum for each of two phases.
KernelSpec two_sums(bool columns) {
  KernelSpec kernel = testing::reduction(Fn::kSum, columns);
  kernel.instructions = {operand(0), apply(Fn::kSum, dtype::kF32, 0),
                         apply(Fn::kSub, dtype::kF32, 0, 1), apply(Fn::kMul, dtype::kF32, 2, 2),
                         apply(Fn::kSum, dtype::kF32, 3)};
  kernel.stores = {{1, 4}};
  return kernel;
}

TEST(CudaKernels, ReductionsOverRows) {
  std::vector<Call> calls;
  for (const int64_t rows : {1, 5, 70}) {
    for (const int64_t columns : {1, 3, 32, 100, 1000, 1023, 4096}) {
      for (const Fn fn : {Fn::kSum, Fn::kAmax, Fn::kAmin}) {
        calls.push_back(
            {testing::reduction(fn, false), {rows, columns}, {{columns, 1}, {1, 0}}, {}, {}});
      }
      calls.push_back({two_sums(false), {rows, columns}, {{columns, 1}, {1, 0}}, {}, {}, 1e-5});
      calls.push_back({testing::softmax(false),
                       {rows, columns},
                       {{columns, 1}, {columns, 1}, {1, 0}},
                       {},
                       {},
                       1e-5});
    }
  }
  check(calls);
}

TEST(CudaKernels, ReductionsOverColumns) {
  std::vector<Call> calls;
  for (const int64_t rows : {1, 5, 70, 300}) {
    for (const int64_t columns : {1, 3, 32, 100}) {
      for (const Fn fn : {Fn::kSum, Fn::kAmax, Fn::kAmin}) {
        calls.push_back(
            {testing::reduction(fn, true), {rows, columns}, {{columns, 1}, {0, 1}}, {}, {}});
      }
      calls.push_back({two_sums(true), {rows, columns}, {{columns, 1}, {0, 1}}, {}, {}, 1e-5});
      calls.push_back({testing::softmax(true),
                       {rows, columns},
                       {{columns, 1}, {columns, 1}, {0, 1}},
                       {},
                       {},
                       1e-5});
    }
  }
  check(calls);
}

// A mean that is kept over steps: read by all threads, written by one.
TEST(CudaKernels, KeptElementsAreReadBeforeTheyAreWritten) {
  std::vector<Call> calls;
  for (const bool columns : {false, true}) {
    KernelSpec kernel = testing::reduction(Fn::kSum, columns);
    kernel.instructions.insert(kernel.instructions.end(),
                               {operand(1), apply(Fn::kAdd, dtype::kF32, 1, 2)});
    kernel.stores = {{1, 3}};
    calls.push_back({kernel,
                     {9, 500},
                     {{500, 1}, columns ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0}},
                     {},
                     {}});
  }
  check(calls);
}

// As often as there are elements, though no memory has them.
TEST(CudaKernels, NumbersAreReduced) {
  std::vector<Call> calls;
  for (const bool columns : {false, true}) {
    KernelSpec kernel = testing::reduction(Fn::kSum, columns);
    kernel.operands = {kernel.operands.back()};
    kernel.scalars = {true};
    kernel.instructions = {scalar(0), apply(Fn::kSum, dtype::kF32, 0),
                           apply(Fn::kMul, dtype::kF32, 0, 1)};
    kernel.stores = {{0, 2}};
    calls.push_back({kernel,
                     {9, 500},
                     {columns ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0}},
                     {std::bit_cast<int64_t>(0.5)},
                     {}});
  }
  check(calls);
}

// Batch norm's way: kept loops outside and a kept one within, two reduced ones.
TEST(CudaKernels, SeveralReducedLoops) {
  KernelSpec rows = testing::reduction(Fn::kSum, false);
  rows.loops = 3;
  rows.reduced = 2;
  KernelSpec columns = testing::reduction(Fn::kSum, true);
  columns.loops = 4;
  columns.reduced = 2;
  check({{rows, {6, 4, 50}, {{50, 300, 1}, {1, 0, 0}}, {}, {}},
         {rows, {6, 4, 48}, {{48, 288, 1}, {1, 0, 0}}, {}, {}},
         // short ones, of which a row of threads takes several at once
         {rows, {6, 33, 1}, {{1, 6, 1}, {1, 0, 0}}, {}, {}},
         {rows, {6, 5, 7}, {{7, 42, 1}, {1, 0, 0}}, {}, {}},
         {rows, {6, 9, 49}, {{49, 294, 1}, {1, 0, 0}}, {}, {}},
         {rows, {6, 3, 64}, {{64, 384, 1}, {1, 0, 0}}, {}, {}},
         {columns, {3, 4, 5, 50}, {{1000, 250, 50, 1}, {50, 0, 0, 1}}, {}, {}}});
}

// A mean of rows that is kept over steps, in place.
KernelSpec kept_mean(bool columns) {
  KernelSpec kernel = testing::softmax(columns);
  kernel.instructions.insert(kernel.instructions.end(),
                             {operand(2), apply(Fn::kAdd, dtype::kF32, 4, 6)});
  kernel.stores = {{1, 5}, {2, 7}};
  return kernel;
}

// Few kept elements of many: each is the work of several blocks.
TEST(CudaKernels, ReductionsInParts) {
  std::vector<Call> calls;
  KernelSpec three = testing::reduction(Fn::kSum, false);
  three.loops = 3;
  three.reduced = 2;
  KernelSpec four = testing::reduction(Fn::kSum, true);
  four.loops = 4;
  four.reduced = 2;
  for (const int64_t length : {70000, 70001}) {
    for (const Fn fn : {Fn::kSum, Fn::kAmax, Fn::kAmin}) {
      calls.push_back({testing::reduction(fn, false), {2, length}, {{length, 1}, {1, 0}}, {}, {}});
    }
    calls.push_back({two_sums(false), {2, length}, {{length, 1}, {1, 0}}, {}, {}, 1e-5});
    calls.push_back(
        {kept_mean(false), {2, length}, {{length, 1}, {length, 1}, {1, 0}}, {}, {}, 1e-5});
    // more rows and images than there are parts of them
    calls.push_back({three, {3, 19, length / 9}, {{length / 9, length, 1}, {1, 0, 0}}, {}, {}});
    calls.push_back({three, {3, 5, length / 2}, {{length / 2, 2 * length, 1}, {1, 0, 0}}, {}, {}});
  }
  for (const int64_t columns : {1, 40}) {
    for (const Fn fn : {Fn::kSum, Fn::kAmax}) {
      calls.push_back(
          {testing::reduction(fn, true), {3000, columns}, {{columns, 1}, {0, 1}}, {}, {}});
    }
    calls.push_back({two_sums(true), {3001, columns}, {{columns, 1}, {0, 1}}, {}, {}, 1e-5});
    calls.push_back(
        {kept_mean(true), {3001, columns}, {{columns, 1}, {columns, 1}, {0, 1}}, {}, {}, 1e-5});
    calls.push_back({four,
                     {2, 7, 700, columns},
                     {{4900 * columns, 700 * columns, columns, 1}, {columns, 0, 0, 1}},
                     {},
                     {}});
  }
  for (const Call& call : calls) EXPECT_TRUE(codegen::has_parts(call.kernel, call.sizes));
  check(calls);
}

// A sum of little and one of much, which differ by their sizes alone, may be in one program.
TEST(CudaKernels, InPartsAndAtOnceShareNoName) {
  const KernelSpec kernel = testing::reduction(Fn::kSum, false);
  std::set<std::string> names;
  for (const bool in_parts : {false, true}) {
    const std::string text = codegen::render_cuda(kernel, in_parts).text;
    const std::regex function(R"((?:void|\)) (\w+)\((?:char|const long)\*)");
    size_t count = 0;
    for (std::sregex_iterator found(text.begin(), text.end(), function), end; found != end;
         ++found) {
      EXPECT_TRUE(names.insert((*found)[1]).second) << (*found)[1] << " in\n" << text;
      ++count;
    }
    EXPECT_EQ(count, in_parts ? 3 : 2) << text;
  }
}

// Whether words are whole or not, and as exactly as the host: 0.1 is no binary fraction.
TEST(CudaKernels, SumsDependOnNothingButTheSizes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  for (const bool columns : {false, true}) {
    const std::vector<int64_t> sizes =
        columns ? std::vector<int64_t>{100000, 4} : std::vector<int64_t>{4, 100000};
    const Call call{
        testing::reduction(Fn::kSum, columns),
        sizes,
        {{sizes[1], 1}, columns ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0}},
        {},
        {}};
    const codegen::KernelText text = text_of(call);
    const testing::EmulatedKernels emulated({text});
    std::vector<std::vector<float>> sums;
    for (const size_t first : {0, 1, 4}) {
      std::vector<float> x(400000 + first, 0.1F);
      std::vector<float> made(4);
      const std::vector<char*> pointers{reinterpret_cast<char*>(x.data() + first),
                                        reinterpret_cast<char*>(made.data())};
      Launches({call}, {pointers}).run(emulated, text.name);
      sums.push_back(made);
    }
    EXPECT_EQ(sums[1], sums[0]);
    EXPECT_EQ(sums[2], sums[0]);
    const double exact = 100000 * static_cast<double>(0.1F);
    EXPECT_NEAR(sums[0][3], exact, exact * 1e-6);
  }
}

TEST(CudaKernels, TheLowestNumbersAreSeen) {
  for (const uint8_t type : {dtype::kI32, dtype::kI64}) {
    const int64_t lowest = type == dtype::kI32 ? std::numeric_limits<int32_t>::min()
                                               : std::numeric_limits<int64_t>::min();
    for (const bool columns : {false, true}) {
      KernelSpec kernel = testing::reduction(Fn::kAmax, columns);
      for (codegen::Operand& each : kernel.operands) each.dtype = type;
      // min(x, the lowest number)
      kernel.scalars = {false};
      kernel.instructions = {operand(0, type), scalar(0, type), apply(Fn::kMin, type, 0, 1),
                             apply(Fn::kAmax, type, 2)};
      kernel.stores = {{1, 3}};
      const Call call{kernel,
                      {4, 40},
                      {{40, 1}, columns ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0}},
                      {lowest},
                      {}};
      check({call});
      const Memory made = make_memory(call);
      const auto host = testing::compiled(kernel);
      host(pointers_of(made).data(), call.geometry().data(), &lowest, 0, call.kept_elements());
      int64_t found = 0;
      memcpy(&found, made[1]->data(), type == dtype::kI32 ? 4 : 8);
      EXPECT_EQ(type == dtype::kI32 ? static_cast<int32_t>(found) : found, lowest);
    }
  }
}

TEST(CudaKernels, NaNAndInfinityGoThrough) {
  for (const Fn fn : {Fn::kSum, Fn::kAmax, Fn::kAmin}) {
    for (const bool columns : {false, true}) {
      KernelSpec kernel = testing::reduction(fn, columns);
      // x / 0 is an infinity, or NaN where x is 0
      kernel.instructions = {operand(0), constant(0), apply(Fn::kDiv, dtype::kF32, 0, 1),
                             apply(fn, dtype::kF32, 2)};
      kernel.stores = {{1, 3}};
      check({{kernel,
              {12, 10},
              {{10, 1}, columns ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0}},
              {},
              {},
              1e-6}});
    }
  }
}

// What stands `number` times before it in the text, replaced.
std::string mutate(std::string text, const std::string& from, const std::string& to, int number) {
  size_t at = text.find(from);
  for (int i = 0; i < number; ++i) at = text.find(from, at + 1);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

enum class Kind { kElements, kRows, kColumns, kRowsInParts, kColumnsInParts };

struct Mutant {
  Kind kind;
  const char* from;
  const char* to;
  int number;  // which occurrence
};

Call call_of(Kind kind) {
  if (kind == Kind::kElements) {
    return {scale(), {1000}, {{1}, {1}}, {std::bit_cast<int64_t>(3.0)}, {}};
  }
  const bool columns = kind == Kind::kColumns || kind == Kind::kColumnsInParts;
  const int64_t length = columns ? 70 : kind == Kind::kRows ? 2002 : 70002;
  const int64_t rows = kind == Kind::kColumnsInParts ? 3000 : kind == Kind::kRowsInParts ? 2 : 300;
  const std::vector<int64_t> kept{columns ? 0 : 1, columns ? 1 : 0};
  return {kept_mean(columns), {rows, length}, {{length, 1}, {length, 1}, kept}, {}, {}};
}

TEST(CudaEmulator, SeesWhatIsWrong) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  const std::vector<Mutant> mutants{
      {Kind::kRows, "__syncthreads();", "", 0},  // across_x
      {Kind::kRows, "__syncthreads();", "", 1},
      {Kind::kRows, "__syncthreads();", "if (threadIdx.x > 0) __syncthreads();", 0},
      {Kind::kRows, "0xffffffffu", "0x7fffffffu", 0},
      {Kind::kRows, "0xffffffffu, v, n", "0xffffffffu, v, n / 2", 0},
      {Kind::kRows, "i < warps", "i < warps - 1", 0},
      {Kind::kRows, "begin + first", "begin + first + V", 2},            // the sum's
      {Kind::kRows, "(e / N * all + at)", "(e / N * all + at / 2)", 0},  // fetch
      {Kind::kRows, "[k * count + at]", "[k * count + (at ^ 1)]", 1},    // recall
      {Kind::kRows, "\narrive();", "", 0},
      {Kind::kRows, "u * apart", "(u + 1) * apart", 1},
      {Kind::kRows, "slot < slots", "slot < slots / 2", 0},
      {Kind::kRows, "slot += blockDim.x * blockDim.y;", "", 0},
      {Kind::kColumns, "__syncthreads();", "", 2},  // across_y
      {Kind::kColumns, "__syncthreads();", "", 3},
      {Kind::kColumns, "i < blockDim.y", "i < blockDim.y - 1", 0},
      {Kind::kColumns, "group < strips * rows", "group <= strips * rows", 0},
      {Kind::kRowsInParts, "turn % count", "turn % (count - 1)", 0},
      {Kind::kRowsInParts, "i = threadIdx.x; i < count", "i = threadIdx.x; i < count - 1", 0},
      {Kind::kRowsInParts, "(part % parts[2] + 1)", "(part % parts[2])", 0},
      {Kind::kRowsInParts, "* (part % parts[2]) /", "* (part % parts[2] + 1) /", 1},
      {Kind::kRowsInParts, "1 * kept * count", "0 * kept * count", 1},  // of one reduction
      {Kind::kRowsInParts, "[part * 1]", "[0]", 0},
      {Kind::kColumnsInParts, "part = turn % count", "part = 0", 0},
      {Kind::kColumnsInParts, "[part * kept]", "[part]", 0},
      {Kind::kColumnsInParts, "i < count; i += blockDim.y", "i < count - 1; i += blockDim.y", 0},
      {Kind::kColumnsInParts, " && part > 0", " && part > 99", 0},
      // values that nobody needs, from behind and before what is there
      {Kind::kRows, "if (WHOLE || e < count) begin_copy", "begin_copy", 0},
      {Kind::kColumns, "if (!here) column = columns - 1;", "", 0},
      {Kind::kElements, "const long blocks =", "const long more = numbers[1], blocks =", 0},
      {Kind::kElements,
       "const long at =", "u8 dropped = pointers[0][turn - 1]; const long at =", 0},
      {Kind::kElements, "turn % turns * V", "(turn % turns + 1) * V", 0},
      {Kind::kElements, "turn < all", "turn + 1 < all", 0},
      {Kind::kElements, "\nfor (int e = 0; e < V", "\nfor (int e = 0; e < V - 1", 0},
  };
  for (const Kind kind :
       {Kind::kElements, Kind::kRows, Kind::kColumns, Kind::kRowsInParts, Kind::kColumnsInParts}) {
    const Call call = call_of(kind);
    const codegen::KernelText right = text_of(call);
    const std::string text = codegen::cuda_preamble() + right.text;
    const testing::EmulatedKernels good({{right.name, text}}, "");
    const Memory expected = run_emulated(call, good, false);
    for (const Mutant& mutant : mutants) {
      if (mutant.kind != kind) continue;
      const testing::EmulatedKernels bad(
          {{right.name, mutate(text, mutant.from, mutant.to, mutant.number)}}, "");
      bool seen = false;
      for (const bool backwards : {false, true}) {
        try {
          const Memory made = run_emulated(call, bad, backwards);
          for (size_t i = 0; i < made.size(); ++i) {
            seen |= !made[i]->is_intact() || !(*made[i] == *expected[i]);
          }
        } catch (const std::runtime_error&) {
          seen = true;
        }
      }
      EXPECT_TRUE(seen) << mutant.from << " -> " << mutant.to << ", number " << mutant.number;
    }
  }
}

TEST(CudaKernels, OneLaunchForManyCalls) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  std::vector<Call> calls;
  for (const int64_t n : {5, 4096, 1, 3000, 64, 9001, 2}) {
    calls.push_back({scale(), {n}, {{1}, {1}}, {std::bit_cast<int64_t>(1.0 + double(n))}, {}});
  }
  const codegen::KernelText text = codegen::render_cuda(scale());
  const codegen::KernelText host = codegen::render_host(scale());
  const testing::EmulatedKernels emulated({text});
  const auto job = jit::compile(codegen::host_preamble(), {{host.name, host.text}});
  job->wait();
  // all of them, and as few as have another number of first blocks to look through
  for (size_t count = 1; count <= calls.size(); ++count) {
    const std::vector<Call> some(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(count));
    std::vector<Memory> made;
    std::vector<std::vector<char*>> pointers;
    for (const Call& call : some) made.push_back(make_memory(call));
    for (size_t i = 0; i < count; ++i) pointers.push_back(pointers_of(made[i]));
    Launches(some, pointers).run(emulated, text.name);
    for (size_t i = 0; i < count; ++i) {
      const Memory expected = make_memory(some[i]);
      run_host(some[i], *job, expected);
      expect_same(some[i], made[i], expected, "of many");
    }
  }
}

TEST(CudaLaunch, CallsWithTheSameThreadsAreOneLaunch) {
  const KernelSpec kernel = testing::reduction(Fn::kSum, /*columns=*/false);
  const std::vector<std::vector<int64_t>> sizes{{3, 8}, {70, 9000}, {500, 16}, {1, 9000}};
  const std::vector<std::span<const int64_t>> spans(sizes.begin(), sizes.end());
  const std::vector<codegen::CudaCalls> made = codegen::cuda_launches(kernel, spans, 4);
  ASSERT_EQ(made.size(), 2U);
  EXPECT_EQ(made[0].calls, (std::vector<size_t>{0, 2}));
  EXPECT_EQ(made[1].calls, (std::vector<size_t>{1, 3}));
  for (const codegen::CudaCalls& group : made) {
    ASSERT_EQ(group.first_blocks.size(), group.calls.size() + 1);
    EXPECT_EQ(group.first_blocks.back(), group.launch.blocks);
    for (size_t i = 0; i < group.calls.size(); ++i) {
      const codegen::CudaLaunch one = codegen::cuda_launch(kernel, sizes[group.calls[i]], 4);
      EXPECT_EQ(group.first_blocks[i + 1] - group.first_blocks[i], one.blocks);
      EXPECT_EQ(one.x, group.launch.x);
    }
  }
}

TEST(CudaLaunch, WhereNothingIsKeptIsOneBlock) {
  for (const bool columns : {false, true}) {
    for (const KernelSpec& kernel :
         {testing::reduction(Fn::kSum, columns), testing::softmax(columns)}) {
      for (const int64_t length : {int64_t{0}, int64_t{8}, int64_t{100000}}) {
        const std::vector<int64_t> sizes =
            columns ? std::vector<int64_t>{length, 0} : std::vector<int64_t>{0, length};
        const codegen::CudaLaunch launch = codegen::cuda_launch(kernel, sizes, 132);
        EXPECT_EQ(launch.blocks, 1U);
        EXPECT_EQ(launch.parts.count(), 1);
        EXPECT_EQ(launch.x % 32, 0U);
      }
    }
  }
}

TEST(CudaLaunch, WhatDecidesBitsDependsOnSizesAlone) {
  for (const bool columns : {false, true}) {
    const KernelSpec kernel = testing::reduction(Fn::kSum, columns);
    for (const int64_t rows : {1, 33, 5000}) {
      for (const int64_t length : {1, 100, 100000}) {
        const std::vector<int64_t> sizes{rows, length};
        const codegen::CudaLaunch few = codegen::cuda_launch(kernel, sizes, 1);
        const codegen::CudaLaunch many = codegen::cuda_launch(kernel, sizes, 1000);
        EXPECT_EQ(few.x, many.x);
        EXPECT_EQ(few.y, many.y);
        EXPECT_EQ(few.parts.outer, many.parts.outer);
        EXPECT_EQ(few.parts.inner, many.parts.inner);
        EXPECT_LE(few.blocks, many.blocks);
        EXPECT_LE(many.x * many.y, 1024U);
        EXPECT_EQ(many.x % 32, 0U);
      }
    }
  }
}

}  // namespace
}  // namespace acc
