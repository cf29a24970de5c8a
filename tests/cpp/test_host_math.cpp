#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "csrc/base/check.h"
#include "tests/cpp/host_math_library.h"

namespace acc::codegen {
namespace {

constexpr double kMaxUlp = 2.0;
constexpr size_t kBlock = 1 << 14;
constexpr double kBeyond = 0x1p128;  // the float that would follow the largest one

using Values = std::vector<float>;

struct Reference {
  // The exact value, as a double: within 2^-50 of it, so no part of an ULP of a float.
  double (*value)(double, double, double);
  // Set where the result must be this float and no other.
  float (*exact)(float, float, float);
};

double sigmoid(double x) {
  return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
}

const std::map<std::string, Reference>& references() {
#define UNARY(name, expression)                                              \
  {                                                                          \
    name, {                                                                  \
      [](double x, double, double) -> double { return expression; }, nullptr \
    }                                                                        \
  }
#define EXACT(name, expression)                         \
  {                                                     \
    name, {                                             \
      nullptr, [](float x, float y, float z) -> float { \
        (void)y, (void)z;                               \
        return expression;                              \
      }                                                 \
    }                                                   \
  }
  static const std::map<std::string, Reference> all = {
      UNARY("acos", std::acos(x)),
      UNARY("asin", std::asin(x)),
      UNARY("atan", std::atan(x)),
      UNARY("cos", std::cos(x)),
      UNARY("cosh", std::cosh(x)),
      UNARY("erf", std::erf(x)),
      UNARY("erfc", std::erfc(x)),
      UNARY("exp", std::exp(x)),
      UNARY("exp2", std::exp2(x)),
      UNARY("expm1", std::expm1(x)),
      UNARY("log", std::log(x)),
      UNARY("log10", std::log10(x)),
      UNARY("log1p", std::log1p(x)),
      UNARY("log2", std::log2(x)),
      UNARY("rsqrt", 1 / std::sqrt(x)),
      UNARY("sigmoid", sigmoid(x)),
      UNARY("sin", std::sin(x)),
      UNARY("sinh", std::sinh(x)),
      UNARY("tan", std::tan(x)),
      UNARY("tanh", std::tanh(x)),
      {"pow", {[](double x, double y, double) { return std::pow(x, y); }, nullptr}},
      EXACT("ceil", std::ceil(x)),
      EXACT("floor", std::floor(x)),
      EXACT("fma", std::fma(x, y, z)),
      EXACT("reciprocal", 1.0f / x),
      EXACT("round", std::nearbyint(x)),
      EXACT("sqrt", std::sqrt(x)),
      EXACT("trunc", std::trunc(x)),
  };
#undef UNARY
#undef EXACT
  return all;
}

// How far `got` is from `value`, in units of the last place of floats there. Infinite for a NaN too
// many or too few, a wrong sign of zero, and an infinity where the value is a float.
double ulps(float got, double value) {
  constexpr double wrong = std::numeric_limits<double>::infinity();
  if (std::isnan(got) || std::isnan(value)) return std::isnan(got) && std::isnan(value) ? 0 : wrong;
  if (got == 0 && std::signbit(got) != std::signbit(value)) return wrong;
  if (value == 0) return got == 0 ? 0 : std::abs(got) / 0x1p-149;
  if (std::abs(value) >= kBeyond) return std::isinf(got) && got * value > 0 ? 0 : wrong;
  const double near = std::isinf(got) ? std::copysign(kBeyond, got) : got;
  const int exponent = std::max(std::ilogb(value), -126);
  return std::abs(near - value) / std::ldexp(1.0, exponent - 23);
}

struct Worst {
  double error = 0;
  float arguments[3] = {};
  float got = 0;
  double value = 0;
};

// Compares every library on one block of arguments; `worst` has an entry for each of them.
void compare(const Reference& reference, const std::vector<Kernel>& kernels, const Values& a,
             const Values& b, const Values& c, std::vector<Worst>& worst) {
  thread_local Values got(kBlock), rounded(kBlock);
  thread_local std::vector<double> value(kBlock);
  for (size_t i = 0; i < kBlock; ++i) {
    value[i] = reference.exact != nullptr ? reference.exact(a[i], b[i], c[i])
                                          : reference.value(a[i], b[i], c[i]);
    rounded[i] =
        std::abs(value[i]) >= kBeyond
            ? std::copysign(std::numeric_limits<float>::infinity(), float(value[i] > 0) - 0.5f)
            : static_cast<float>(value[i]);
  }
  for (size_t k = 0; k < kernels.size(); ++k) {
    kernels[k](a.data(), b.data(), c.data(), got.data(), kBlock);
    for (size_t i = 0; i < kBlock; ++i) {
      if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(rounded[i])) continue;
      const double error = ulps(got[i], value[i]);
      if (!(error > worst[k].error)) continue;
      worst[k] = {error, {a[i], b[i], c[i]}, got[i], value[i]};
    }
  }
}

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// Both signs of: zero, every power of two and its neighbours, infinity, NaNs, small integers and
// halves, neighbours of multiples of pi / 2, and where functions overflow or underflow.
Values special_values() {
  Values values = {0.0f,
                   std::numeric_limits<float>::infinity(),
                   FLT_MAX,
                   std::bit_cast<float>(0x7fc00000u),
                   std::bit_cast<float>(0x7f800001u),
                   std::bit_cast<float>(0x7fffffffu)};
  const auto around = [&](double x) {
    float low = static_cast<float>(x), high = low;
    values.push_back(low);
    for (int i = 0; i < 3; ++i) {
      values.push_back(low = std::nextafter(low, -INFINITY));
      values.push_back(high = std::nextafter(high, INFINITY));
    }
  };
  for (int exponent = -149; exponent < 128; ++exponent) around(std::ldexp(1.0, exponent));
  for (int i = 1; i < 40; ++i) around(i / 2.0);
  for (int i = 1; i < 200; ++i) around(i * 1.5707963267948966);
  for (double x :
       {88.02969193, 88.72283906, 89.41598625, 87.33654475, 103.2789,   103.9720840, 9.0109,
        4.0,         3.9192059,   9.1944,      10.0541,     1e5,        126.0,       127.0,
        149.0,       150.0,       0.625,       17.3286,     0.34657359, 1.41421356,  0.70710678}) {
    around(x);
  }
  // where a run over all floats found the largest errors, or errors above the bound in earlier
  // forms
  for (float x : {17912.5762f, 20.342371f, 7.810781f, 3697.69775f, 1.31914711f, 1.36455715f,
                  5.85707951f, 0.631044209f, 0.706674337f, 0.437376529f, 5.14339781f, 1.00087595f,
                  1.41824055f, 16.9880657f, 0.591768324f}) {
    around(x);
  }
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  return values;
}

// Arguments number [first, first + kBlock) of the sample of 2^22 patterns: one pattern out of each
// run of 1024, so that all exponents and signs come equally often.
void sample_unary(uint64_t first, Values& a) {
  for (uint64_t i = 0; i < kBlock; ++i) {
    a[i] = std::bit_cast<float>(uint32_t((first + i) << 10 | (mix(first + i) & 1023)));
  }
}

// The second and third arguments: any patterns in every second place, between them arguments whose
// results are no infinities, zeros or copies.
void sample_rest(const std::string& name, uint64_t first, Values& a, Values& b, Values& c) {
  for (uint64_t i = 0; i < kBlock; ++i) {
    const uint64_t random = mix(~(first + i));
    const double unit = (random >> 11) * 0x1p-53;
    b[i] = std::bit_cast<float>(uint32_t(random));
    c[i] = std::bit_cast<float>(uint32_t(random >> 32));
    if (name == "pow" && first / kBlock % 2 == 1) {
      // whole vectors without anything unusual
      a[i] = std::max(std::abs(a[i]), FLT_MIN);
      if (!(a[i] < INFINITY)) a[i] = 1 + static_cast<float>(unit);
      b[i] = static_cast<float>((unit * 250 - 125) / std::log2(a[i] == 1 ? 2 : a[i]));
      continue;
    }
    if (i % 2 == 0) continue;
    if (name == "pow") {
      if (i % 4 == 1) a[i] = std::exp2(static_cast<float>(unit * 8 - 4));
      b[i] = static_cast<float>((int64_t(random % 65536) - 32768) / 32768.0 * 151 /
                                std::log2(std::abs(a[i])));
      if (i % 8 == 3) b[i] = std::rint(b[i]);
    } else if (i % 4 == 1) {
      c[i] = -(a[i] * b[i]);
    }
  }
}

class HostMath : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new ScratchFolder;
    libraries_ = new std::vector<Library>;
    for (const std::string& compiler : compilers()) {
      for (const std::string& machine : machine_flags()) {
        libraries_->emplace_back(*folder_, compiler, machine, host_math_names());
      }
    }
  }
  static void TearDownTestSuite() {
    delete libraries_;
    delete folder_;
  }
  static inline ScratchFolder* folder_ = nullptr;
  static inline std::vector<Library>* libraries_ = nullptr;
};

std::string describe(const Worst& worst, int arguments) {
  char text[160];
  std::string result;
  for (int i = 0; i < arguments; ++i) {
    snprintf(text, sizeof text, "%s%.9g (0x%08x)", i ? ", " : "", worst.arguments[i],
             std::bit_cast<uint32_t>(worst.arguments[i]));
    result += text;
  }
  snprintf(text, sizeof text, ": %.9g, exactly %.12g", worst.got, worst.value);
  return result + text;
}

TEST(HostMathText, HasAReferenceForEveryFunction) {
  std::vector<std::string> names;
  for (const auto& [name, reference] : references()) names.push_back(name);
  EXPECT_EQ(host_math_names(), names);
}

TEST(HostMathText, RefusesAnUnknownName) {
  EXPECT_THROW(host_math({"exp", "gamma"}), base::Error);
  EXPECT_THROW(host_math({"exp_parts"}), base::Error);  // a part of exp, no function
}

TEST(HostMathText, HoldsEachFunctionOnceAndNoOther) {
  const auto times = [](const std::string& text, const std::string& what) {
    size_t count = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++count;
    return count;
  };
  const std::string text = host_math({"tanh", "exp", "sigmoid", "exp"});
  for (const char* one : {" exp_f32(F32 x) {", " tanh_f32(F32 x) {", " exp_parts_f32(F32 x) {"}) {
    EXPECT_EQ(times(text, one), 1u) << one;
  }
  EXPECT_EQ(times(text, "log_f32"), 0u);
  EXPECT_EQ(times(text, "#include"), 0u);
  EXPECT_EQ(text, host_math({"sigmoid", "tanh", "exp"}));
}

TEST_F(HostMath, CompilesAloneForEveryFunction) {
  if (compilers().empty()) GTEST_SKIP() << "no g++ or clang++ here";
  for (const std::string& name : host_math_names()) {
    std::ofstream(*folder_ / "one.cpp") << kernels_text({name});
    const Output output =
        shell(compile_command(compilers()[0], "") + " -fsyntax-only " + (*folder_ / "one.cpp"));
    EXPECT_EQ(output.status, 0) << name << "\n" << output.text;
  }
}

// Unary functions: special values and a sample; with ACC_TEST_FULL=1 every float there is.
// Others: all pairs of special values and a sample.
TEST_F(HostMath, IsWithinTwoUlpOfTheExactValue) {
  if (libraries_->empty()) GTEST_SKIP() << "no g++ or clang++ here";
  for (const Library& library : *libraries_) {
    ASSERT_NE(library.kernel("exp"), nullptr) << library.what() << "\n" << library.problem();
  }
  const char* full = std::getenv("ACC_TEST_FULL");
  const bool all = full != nullptr && std::string(full) == "1";
  const Values special = special_values();

  for (const auto& [name, reference] : references()) {
    std::vector<Kernel> kernels;
    for (const Library& library : *libraries_) kernels.push_back(library.kernel(name));
    const bool unary = arity(name) == 1;
    const uint64_t specials = unary ? special.size() : special.size() * special.size();
    const uint64_t special_blocks = (specials + kBlock - 1) / kBlock;
    const uint64_t blocks = special_blocks + ((unary && all ? 1ull << 32 : 1ull << 22) / kBlock);

    std::vector<Worst> worst(kernels.size());
    std::mutex mutex;
    std::atomic<uint64_t> next = 0;
    const auto work = [&] {
      Values a(kBlock), b(kBlock), c(kBlock);
      std::vector<Worst> mine(kernels.size());
      for (uint64_t block; (block = next++) < blocks;) {
        for (uint64_t i = 0; block < special_blocks && i < kBlock; ++i) {
          const uint64_t index = (block * kBlock + i) % specials;
          a[i] = special[index % special.size()];
          b[i] = special[index / special.size()];
          c[i] = special[mix(index) % special.size()];
        }
        if (block >= special_blocks) {
          const uint64_t first = (block - special_blocks) * kBlock;
          if (unary && all) {
            for (uint64_t i = 0; i < kBlock; ++i) a[i] = std::bit_cast<float>(uint32_t(first + i));
          } else {
            sample_unary(first, a);
            if (!unary) sample_rest(name, first, a, b, c);
          }
        }
        compare(reference, kernels, a, b, c, mine);
      }
      const std::lock_guard lock(mutex);
      for (size_t k = 0; k < worst.size(); ++k) {
        if (mine[k].error > worst[k].error) worst[k] = mine[k];
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < std::min(std::thread::hardware_concurrency(), 8u); ++i) {
      threads.emplace_back(work);
    }
    work();
    for (std::thread& thread : threads) thread.join();

    size_t largest = 0;
    for (size_t k = 0; k < worst.size(); ++k) {
      const double bound = reference.exact != nullptr ? 0 : kMaxUlp;
      EXPECT_LE(worst[k].error, bound)
          << name << ", " << (*libraries_)[k].what() << ": " << describe(worst[k], arity(name));
      if (worst[k].error > worst[largest].error) largest = k;
    }
    printf("%-10s max %.3f ULP  %s  [%s]\n", name.c_str(), worst[largest].error,
           describe(worst[largest], arity(name)).c_str(), (*libraries_)[largest].what().c_str());
    fflush(stdout);
  }
}

// The first line of a disassembly that does arithmetic on one lane or calls another library.
std::string scalar_line(const std::string& disassembly) {
  std::istringstream lines(disassembly);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab == std::string::npos) continue;
    const std::string instruction = line.substr(tab + 1, line.find(' ', tab) - tab - 1);
    const bool scalar = instruction.ends_with("ss") || instruction.ends_with("sd");
    for (const char* part : {"add", "sub", "mul", "div", "sqrt", "round", "rndscale"}) {
      if (scalar && instruction.find(part) != std::string::npos) return line;
    }
    const size_t plt = line.find("@plt>");
    if (plt != std::string::npos && line.find("<__cxa_finalize") != std::string::npos) continue;
    if (plt != std::string::npos) return line;
  }
  return "";
}

// The loops over lanes in the text are for the compiler to turn into one instruction. If it does
// not, nothing is wrong but the speed, so this looks at the instructions.
TEST_F(HostMath, BecomesVectorInstructionsWithoutCalls) {
  if (compilers().empty()) GTEST_SKIP() << "no g++ or clang++ here";
  if (!have_program("objdump")) GTEST_SKIP() << "no objdump here";
#if !defined(__x86_64__)
  GTEST_SKIP() << "knows the instructions of x86-64 only";
#endif
  const std::vector<std::string> names = {"exp",   "log",   "tanh", "erf",   "sqrt",
                                          "floor", "round", "fma",  "log1p", "sigmoid"};
  const std::string library = *folder_ / "vector.so";
  std::ofstream(*folder_ / "vector.cpp") << kernels_text(names);
  for (const std::string& compiler : compilers()) {
    for (const char* machine : {"-mavx2 -mfma", "-mavx512f -mavx512dq -mfma"}) {
      const Output compiled = shell(compile_command(compiler, machine) + " -shared -o " + library +
                                    " " + (*folder_ / "vector.cpp") + " -lm");
      ASSERT_EQ(compiled.status, 0) << compiled.text;
      const Output text = shell("objdump -d --no-show-raw-insn " + library);
      ASSERT_EQ(text.status, 0) << text.text;
      EXPECT_NE(text.text.find("vsqrtps"), std::string::npos);
      EXPECT_EQ(scalar_line(text.text), "") << compiler << " " << machine;
    }
  }
}

}  // namespace
}  // namespace acc::codegen
