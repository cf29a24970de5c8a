// Kernels as they are rendered: compiled by the system's compiler, run, and compared with the same
// instructions carried out one element at a time.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "tests/cpp/kernel_builder.h"

namespace acc {
namespace {

using codegen::Instruction;
using codegen::KernelSpec;
using codegen::Walk;
using graph::Fn;
using testing::apply;
using testing::compiled;
using testing::constant;
using testing::operand;
using testing::position;
using testing::scalar;
using testing::scale;
namespace dtype = graph::dtype;

void run(const KernelSpec& kernel, std::vector<void*> pointers, std::vector<int64_t> geometry,
         std::vector<int64_t> numbers, int64_t begin, int64_t end) {
  const codegen::HostFunction function = compiled(kernel);
  ASSERT_NE(function, nullptr);
  std::vector<char*> bytes;
  for (void* pointer : pointers) bytes.push_back(static_cast<char*>(pointer));
  function(bytes.data(), geometry.data(), numbers.data(), begin, end);
}

TEST(Kernels, EveryLengthAndEveryPieceOfIt) {
  constexpr float kUntouched = -77;
  for (int64_t n = 1; n < 70; ++n) {
    for (int64_t begin = 0; begin < n; begin += 7) {
      for (const int64_t end : {begin + 1, (begin + n + 1) / 2, n}) {
        std::vector<float> x(n);
        std::vector<float> y(n, kUntouched);
        for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(i);
        run(scale(), {x.data(), y.data()}, {n, 1, 1}, {std::bit_cast<int64_t>(3.0)}, begin, end);
        for (int64_t i = 0; i < n; ++i) {
          const bool inside = i >= begin && i < end;
          ASSERT_EQ(y[i], inside ? x[i] * 3 + 1 : kUntouched) << n << " " << begin << " " << end;
        }
      }
    }
  }
}

// Two pages, and before and behind them one that nobody may touch.
class Fenced {
 public:
  Fenced()
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        base_(static_cast<char*>(
            mmap(nullptr, 4 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    EXPECT_EQ(mprotect(begin(), 2 * page_, PROT_READ | PROT_WRITE), 0);
  }
  ~Fenced() { munmap(base_, 4 * page_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  char* begin() const { return base_ + page_; }
  char* end() const { return base_ + 3 * page_; }

 private:
  const size_t page_;
  char* const base_;
};

// The rest of a row is computed as in a longer row, and nothing before or behind it is touched: a
// fault ends the test. `steps`: applied to what is loaded as `computed`. `wanted`: what they make
// of an element, where that is exact.
template <class In, class Out>
void rests_as_in_a_longer_row(uint8_t in_type, uint8_t out_type, uint8_t computed,
                              const std::vector<Fn>& steps,
                              const std::function<Out(In)>& wanted = nullptr) {
  KernelSpec kernel;
  kernel.operands = {{in_type, Walk::kContiguous, false}, {out_type, Walk::kContiguous, true}};
  kernel.instructions = {operand(0, computed)};
  for (uint32_t i = 0; i < steps.size(); ++i) {
    kernel.instructions.push_back(apply(steps[i], computed, i));
  }
  kernel.stores = {{1, static_cast<uint32_t>(steps.size())}};
  constexpr int64_t kLonger = 256;  // whole turns
  const auto value = [&](int64_t i) {
    if (in_type == dtype::kBool) return static_cast<In>(i % 2);
    return static_cast<In>(sizeof(In) == 2 ? 0x3c00 + i : i);  // halves are normal numbers
  };
  std::vector<In> x(kLonger);
  std::vector<Out> expected(kLonger);
  for (int64_t i = 0; i < kLonger; ++i) x[i] = value(i);
  run(kernel, {x.data(), expected.data()}, {kLonger, 1, 1}, {}, 0, kLonger);
  ASSERT_NE(expected[0], expected[kLonger - 1]);
  for (int64_t i = 0; wanted && i < kLonger; ++i) ASSERT_EQ(expected[i], wanted(x[i])) << i;
  constexpr Out kUntouched{77};
  const Fenced in;
  const Fenced out;
  for (int64_t n = 1; n < 130; ++n) {
    for (const bool at_end : {false, true}) {
      In* a = at_end ? reinterpret_cast<In*>(in.end()) - n : reinterpret_cast<In*>(in.begin());
      Out* b = at_end ? reinterpret_cast<Out*>(out.end()) - n : reinterpret_cast<Out*>(out.begin());
      std::fill(reinterpret_cast<Out*>(out.begin()), reinterpret_cast<Out*>(out.end()), kUntouched);
      std::copy_n(x.begin(), n, a);
      run(kernel, {a, b}, {n, 1, 1}, {}, 0, n);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(b[i], expected[i]) << n << " " << i;
      ASSERT_EQ(at_end ? b[-1] : b[n], kUntouched) << n;
    }
  }
}

TEST(Kernels, TheRestOfARowTouchesNothingBesideIt) {
  const auto twice = [](auto x) { return static_cast<decltype(x)>(2 * x); };
  const std::vector<Fn> add{Fn::kAdd};
  rests_as_in_a_longer_row<float, float>(dtype::kF32, dtype::kF32, dtype::kF32, add, twice);
  rests_as_in_a_longer_row<double, double>(dtype::kF64, dtype::kF64, dtype::kF64, add, twice);
  rests_as_in_a_longer_row<int32_t, int32_t>(dtype::kI32, dtype::kI32, dtype::kI32, add, twice);
  rests_as_in_a_longer_row<int64_t, int64_t>(dtype::kI64, dtype::kI64, dtype::kI64, add, twice);
}

TEST(Kernels, TheRestOfARowOfSmallTypesTouchesNothingBesideIt) {
  const std::vector<Fn> negate{Fn::kNeg};
  const auto other_sign = [](uint16_t x) { return static_cast<uint16_t>(x ^ 0x8000); };
  for (const uint8_t half : {dtype::kF16, dtype::kBF16}) {
    rests_as_in_a_longer_row<uint16_t, uint16_t>(half, half, dtype::kF32, negate, other_sign);
    // as many vectors at a time as there are
    rests_as_in_a_longer_row<uint16_t, uint16_t>(half, half, dtype::kF32, {Fn::kTanh, Fn::kExp});
  }
  const auto inverse = [](uint8_t x) { return static_cast<uint8_t>(x == 0); };
  rests_as_in_a_longer_row<uint8_t, uint8_t>(dtype::kBool, dtype::kBool, dtype::kBool, {Fn::kNot},
                                             inverse);
  const auto negative = [](auto x) { return -static_cast<int32_t>(x); };
  const auto wide = dtype::kI32;
  rests_as_in_a_longer_row<uint8_t, int32_t>(dtype::kU8, wide, wide, negate, negative);
  rests_as_in_a_longer_row<int8_t, int32_t>(dtype::kI8, wide, wide, negate, negative);
  rests_as_in_a_longer_row<int16_t, int32_t>(dtype::kI16, wide, wide, negate, negative);
}

TEST(Kernels, RowsWithBroadcastAndStridedOperands) {
  const KernelSpec kernel = testing::broadcast_and_strided();
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{5, 37}, {37, 5}, {1, 64}}) {
    const int64_t n = rows * columns;
    std::vector<float> a(n), row(columns), column(rows), t(n), out(2 * n, 0);
    for (int64_t i = 0; i < n; ++i) {
      a[i] = static_cast<float>(i);
      t[i] = static_cast<float>(i * i % 17);
    }
    for (int64_t j = 0; j < columns; ++j) row[j] = static_cast<float>(j + 1);
    for (int64_t i = 0; i < rows; ++i) column[i] = static_cast<float>(2 * i - 3);
    const std::vector<int64_t> geometry{rows, columns, columns, 1,    0,           1,
                                        1,    0,       1,       rows, 2 * columns, 2};
    for (int64_t cut = 0; cut <= n; cut += 11) {  // two threads, cut anywhere
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, cut}, {cut, n}}) {
        run(kernel, {a.data(), row.data(), column.data(), t.data(), out.data()}, geometry, {},
            begin, end);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        ASSERT_EQ(out[2 * (i * columns + j)],
                  a[i * columns + j] + row[j] * column[i] - t[j * rows + i]);
        ASSERT_EQ(out[2 * (i * columns + j) + 1], 0);
      }
    }
  }
}

// Functions that wait for functions compute on several vectors at a turn of the loop.
TEST(Kernels, ChainsOfFunctionsInRowsOfEveryLength) {
  // out[i, j] = exp(tanh(a[i, j] * column[i] + t[j, i])), positive[i, j] = tanh > 0
  KernelSpec kernel;
  kernel.loops = 2;
  kernel.operands = {{dtype::kF32, Walk::kContiguous, false},
                     {dtype::kF32, Walk::kBroadcast, false},
                     {dtype::kF32, Walk::kStrided, false},
                     {dtype::kF32, Walk::kStrided, true},
                     {dtype::kBool, Walk::kContiguous, true}};
  kernel.instructions = {operand(0),
                         operand(1),
                         apply(Fn::kMul, dtype::kF32, 0, 1),
                         operand(2),
                         apply(Fn::kAdd, dtype::kF32, 2, 3),
                         apply(Fn::kTanh, dtype::kF32, 4),
                         apply(Fn::kExp, dtype::kF32, 5),
                         constant(0),
                         apply(Fn::kGt, dtype::kBool, 5, 7)};
  kernel.stores = {{3, 6}, {4, 8}};
  ASSERT_NE(codegen::render_host(kernel).text.find("v6_3"), std::string::npos);
  constexpr int64_t kRows = 3;
  for (int64_t columns = 1; columns < 150; columns += columns < 70 ? 3 : 29) {
    const int64_t n = kRows * columns;
    std::vector<float> a(n), column(kRows), t(n), out(2 * n, -77);
    std::vector<uint8_t> positive(n, 7);
    for (int64_t i = 0; i < n; ++i) {
      a[i] = static_cast<float>(i % 19 - 9) / 8;
      t[i] = static_cast<float>(i * i % 17 - 8) / 16;
    }
    for (int64_t i = 0; i < kRows; ++i) column[i] = static_cast<float>(2 * i - 3) / 4;
    const std::vector<int64_t> geometry{kRows, columns, columns,     1, 1,       0,
                                        1,     kRows,   2 * columns, 2, columns, 1};
    const int64_t cut = n * 2 / 5;  // two threads
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, cut}, {cut, n}}) {
      if (begin == end) continue;
      run(kernel, {a.data(), column.data(), t.data(), out.data(), positive.data()}, geometry, {},
          begin, end);
    }
    for (int64_t i = 0; i < n; ++i) {
      const double sum = a[i] * column[i / columns] + t[i % columns * kRows + i / columns];
      ASSERT_NEAR(out[2 * i], std::exp(std::tanh(sum)), 1e-6) << columns << " " << i;
      ASSERT_EQ(out[2 * i + 1], -77) << columns << " " << i;
      ASSERT_EQ(positive[i], sum > 0 ? 1 : 0) << columns << " " << i;
    }
  }
}

TEST(Kernels, PositionsCountAlongAnyLoop) {
  // out[i, j] = 1000 * i + 10 * j + k, where k goes on by 3 with j
  KernelSpec kernel;
  kernel.loops = 2;
  kernel.operands = {{dtype::kF32, Walk::kContiguous, true}};
  kernel.positions = {{Walk::kBroadcast}, {Walk::kContiguous}, {Walk::kStrided}};
  kernel.instructions = {position(0),
                         position(1),
                         position(2),
                         constant(1000),
                         apply(Fn::kMul, dtype::kF32, 0, 3),
                         constant(10),
                         apply(Fn::kMul, dtype::kF32, 1, 5),
                         apply(Fn::kAdd, dtype::kF32, 4, 6),
                         apply(Fn::kAdd, dtype::kF32, 7, 2)};
  kernel.stores = {{0, 8}};
  for (int64_t columns = 1; columns < 100; columns += 7) {
    constexpr int64_t kRows = 4;
    std::vector<float> out(kRows * columns, -1);
    const std::vector<int64_t> geometry{kRows, columns, columns, 1, 1, 0, 0, 1, 0, 3};
    const int64_t cut = kRows * columns * 2 / 5;  // two threads
    if (cut > 0) run(kernel, {out.data()}, geometry, {}, 0, cut);
    run(kernel, {out.data()}, geometry, {}, cut, kRows * columns);
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        ASSERT_EQ(out[i * columns + j], 1000 * i + 10 * j + 3 * j) << columns;
      }
    }
  }
}

TEST(Kernels, InPlaceReadsBeforeItWrites) {
  KernelSpec kernel = scale();
  kernel.operands = {{dtype::kF32, Walk::kContiguous, true}};
  kernel.stores = {{0, 4}};
  std::vector<float> x(1000, 2);
  run(kernel, {x.data()}, {1000, 1}, {std::bit_cast<int64_t>(5.0)}, 0, 1000);
  for (const float value : x) ASSERT_EQ(value, 11);
}

// One conversion: loads `from`, casts, stores `to`.
template <class From, class To>
void expect_conversion(uint8_t from, uint8_t to, uint8_t computed_from, uint8_t computed_to,
                       const std::vector<From>& values, To (*expected)(From)) {
  KernelSpec kernel;
  kernel.operands = {{from, Walk::kContiguous, false}, {to, Walk::kContiguous, true}};
  kernel.instructions = {operand(0, computed_from)};
  if (computed_from != computed_to) {
    kernel.instructions.push_back(apply(Fn::kCast, computed_to, 0));
  }
  kernel.stores = {{1, static_cast<uint32_t>(kernel.instructions.size() - 1)}};
  std::vector<From> x = values;
  std::vector<To> y(x.size());
  const auto n = static_cast<int64_t>(x.size());
  run(kernel, {x.data(), y.data()}, {n, 1, 1}, {}, 0, n);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(y[i], expected(x[i]))
        << graph::dtype_name(from) << " to " << graph::dtype_name(to) << " of element " << i;
  }
}

TEST(Kernels, Conversions) {
  const std::vector<float> floats{0, -0.0F, 1.5F, -2.75F, 100, 0.3F, 1e6F, -1e6F, 3};
  expect_conversion<float, double>(6, 7, 6, 7, floats, [](float x) { return double{x}; });
  expect_conversion<float, int64_t>(6, 4, 6, 4, floats,
                                    [](float x) { return static_cast<int64_t>(x); });
  expect_conversion<float, int32_t>(6, 3, 6, 3, floats,
                                    [](float x) { return static_cast<int32_t>(x); });
  expect_conversion<float, uint8_t>(6, 11, 6, 11, floats,
                                    [](float x) { return static_cast<uint8_t>(x != 0); });
  expect_conversion<double, float>(7, 6, 7, 6, {0, 1.0 / 3, 1e300, -1e-300},
                                   [](double x) { return static_cast<float>(x); });
  expect_conversion<uint8_t, float>(11, 6, 11, 6, {0, 1, 1, 0, 1},
                                    [](uint8_t x) { return x != 0 ? 1.0F : 0.0F; });
  expect_conversion<uint8_t, float>(0, 6, 3, 6, {0, 1, 127, 128, 255},
                                    [](uint8_t x) { return static_cast<float>(x); });
  expect_conversion<int8_t, float>(1, 6, 3, 6, {0, 1, 127, -128, -1},
                                   [](int8_t x) { return static_cast<float>(x); });
  expect_conversion<int64_t, double>(4, 7, 4, 7, {0, -5, int64_t{1} << 40},
                                     [](int64_t x) { return static_cast<double>(x); });
  expect_conversion<uint8_t, int64_t>(11, 4, 11, 4, {0, 1, 1},
                                      [](uint8_t x) { return static_cast<int64_t>(x); });
}

// To the nearest, ties to even, as the definition of the formats says.
template <int kMantissa, int kMinExponent>
double rounded(double x, double max) {
  if (std::isnan(x) || x == 0 || std::isinf(x)) return x;
  const int exponent = std::max(std::ilogb(x), kMinExponent);
  const double unit = std::ldexp(1.0, exponent - kMantissa);
  const double result = std::nearbyint(x / unit) * unit;
  return std::abs(result) > max ? std::copysign(INFINITY, x) : result;
}

TEST(Kernels, HalfTypesRoundToNearestEven) {
  std::mt19937 random(3);
  std::vector<float> x{0,     -0.0F, INFINITY, -INFINITY, NAN,  65504,
                       65519, 65520, 1e-8F,    6e-8F,     1e38F};
  while (x.size() < 20000) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    x.push_back(value);
    x.push_back(std::ldexp(1 + static_cast<float>(random() % 4096) / 4096,
                           static_cast<int>(random() % 44) - 26));
  }
  for (const uint8_t half : {dtype::kF16, dtype::kBF16}) {
    KernelSpec kernel;  // rounds, and gives the rounded float32 back
    kernel.operands = {{dtype::kF32, Walk::kContiguous, false},
                       {half, Walk::kContiguous, true},
                       {dtype::kF32, Walk::kContiguous, true}};
    Instruction round = apply(Fn::kCast, dtype::kF32, 0);
    round.index = half;
    kernel.instructions = {operand(0), round};
    kernel.stores = {{1, 0}, {2, 1}};
    std::vector<uint16_t> bits(x.size());
    std::vector<float> back(x.size());
    const auto n = static_cast<int64_t>(x.size());
    run(kernel, {x.data(), bits.data(), back.data()}, {n, 1, 1, 1}, {}, 0, n);
    for (size_t i = 0; i < x.size(); ++i) {
      const double expected = half == dtype::kF16 ? rounded<10, -14>(x[i], 65504)
                                                  : rounded<7, -126>(x[i], 3.3895313892515355e38);
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(back[i]));
      } else {
        ASSERT_EQ(back[i], expected) << x[i] << " as " << graph::dtype_name(half);
      }
    }
  }
}

// The instructions of random kernels, one element at a time in double and then rounded to float32:
// exact for +, -, *, /, comparisons and choices of float32 numbers.
TEST(Kernels, RandomKernelsEqualTheirInstructions) {
  std::mt19937 random(5);
  const auto pick = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 30; ++round) {
    KernelSpec kernel;
    const uint32_t inputs = 1 + pick(4);
    for (uint32_t i = 0; i < inputs; ++i) {
      kernel.operands.push_back({dtype::kF32, Walk::kContiguous, false});
      kernel.instructions.push_back(operand(i));
    }
    std::vector<uint32_t> numbers;
    std::vector<uint32_t> truths;
    for (uint32_t i = 0; i < inputs; ++i) numbers.push_back(i);
    while (kernel.instructions.size() < 12) {
      const auto any = [&] { return numbers[pick(static_cast<uint32_t>(numbers.size()))]; };
      constexpr Fn kArithmetic[] = {Fn::kAdd, Fn::kSub, Fn::kMul, Fn::kMin, Fn::kMax};
      constexpr Fn kComparison[] = {Fn::kEq, Fn::kNe, Fn::kLt, Fn::kLe, Fn::kGt, Fn::kGe};
      const auto at = static_cast<uint32_t>(kernel.instructions.size());
      switch (pick(4)) {
        case 0:
          kernel.instructions.push_back(apply(kComparison[pick(6)], dtype::kBool, any(), any()));
          truths.push_back(at);
          break;
        case 1:
          if (truths.empty()) continue;
          kernel.instructions.push_back(apply(Fn::kSelect, dtype::kF32,
                                              truths[pick(static_cast<uint32_t>(truths.size()))],
                                              any(), any()));
          numbers.push_back(at);
          break;
        default:
          kernel.instructions.push_back(apply(kArithmetic[pick(5)], dtype::kF32, any(), any()));
          numbers.push_back(at);
      }
    }
    kernel.operands.push_back({dtype::kF32, Walk::kContiguous, true});
    kernel.stores = {{inputs, numbers.back()}};

    constexpr int64_t kElements = 333;
    std::vector<std::vector<float>> data(inputs + 1, std::vector<float>(kElements));
    std::vector<void*> pointers;
    for (std::vector<float>& one : data) {
      for (float& x : one) x = static_cast<float>(static_cast<int>(random() % 9) - 4) / 2;
      pointers.push_back(one.data());
    }
    std::vector<int64_t> geometry(inputs + 2, 1);
    geometry[0] = kElements;
    run(kernel, pointers, geometry, {}, 0, kElements);

    for (int64_t element = 0; element < kElements; ++element) {
      std::vector<float> v;
      for (const Instruction& each : kernel.instructions) {
        const auto in = [&](size_t i) { return v[each.inputs[i]]; };
        switch (each.fn) {
          case Fn::kOperand:
            v.push_back(data[each.index][element]);
            break;
          case Fn::kAdd:
            v.push_back(in(0) + in(1));
            break;
          case Fn::kSub:
            v.push_back(in(0) - in(1));
            break;
          case Fn::kMul:
            v.push_back(in(0) * in(1));
            break;
          case Fn::kMin:
            v.push_back(std::fmin(in(0), in(1)));
            break;
          case Fn::kMax:
            v.push_back(std::fmax(in(0), in(1)));
            break;
          case Fn::kEq:
            v.push_back(in(0) == in(1));
            break;
          case Fn::kNe:
            v.push_back(in(0) != in(1));
            break;
          case Fn::kLt:
            v.push_back(in(0) < in(1));
            break;
          case Fn::kLe:
            v.push_back(in(0) <= in(1));
            break;
          case Fn::kGt:
            v.push_back(in(0) > in(1));
            break;
          case Fn::kGe:
            v.push_back(in(0) >= in(1));
            break;
          default:
            v.push_back(in(0) != 0 ? in(1) : in(2));
        }
      }
      ASSERT_EQ(data[inputs][element], v[numbers.back()]) << "round " << round;
    }
  }
}

// Names of variables are letters and numbers, as those of types are: none may hide another.
TEST(Kernels, EveryTypeAtEveryOperand) {
  constexpr uint8_t kTypes[] = {dtype::kBool, dtype::kU8,  dtype::kI8,   dtype::kI16, dtype::kI32,
                                dtype::kI64,  dtype::kF16, dtype::kBF16, dtype::kF32, dtype::kF64};
  constexpr uint32_t kOperands = 20;
  for (const Walk walk : {Walk::kContiguous, Walk::kStrided}) {
    for (const uint8_t type : kTypes) {
      const bool half = type == dtype::kF16 || type == dtype::kBF16;
      const bool small = type == dtype::kU8 || type == dtype::kI8 || type == dtype::kI16;
      const uint8_t computed = half ? dtype::kF32 : small ? dtype::kI32 : type;
      KernelSpec kernel;
      kernel.loops = 2;
      for (uint32_t i = 0; i < 2 * kOperands; ++i) {
        const bool stored = i >= kOperands;  // small integers are only read
        kernel.operands.push_back({stored && small ? computed : type, walk, stored});
      }
      for (uint32_t i = 0; i < kOperands; ++i) {
        kernel.instructions.push_back(operand(i, computed));
        kernel.stores.push_back({kOperands + i, i});
      }
      EXPECT_NE(compiled(kernel), nullptr) << "type " << int{type};
    }
  }
}

TEST(Kernels, EqualComputationsAreEqualText) {
  const codegen::KernelText a = codegen::render_host(scale());
  const codegen::KernelText b = codegen::render_host(scale());
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.text, b.text);
  KernelSpec other = scale();
  other.instructions[3].constant = 1.5;
  EXPECT_NE(codegen::render_host(other).name, a.name);
  EXPECT_EQ(a.text.find("#include"), std::string::npos);
}

}  // namespace
}  // namespace acc
