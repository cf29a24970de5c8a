// The emulator itself, by kernels that no renderer wrote.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cuda_emulator/emulator.h"
#include "tests/cuda_emulator/guarded.h"

namespace acc {
namespace {

using testing::Guarded;

constexpr unsigned kThreads = 64;

// What the threads of a block make of so many words of memory.
std::vector<long> run(const std::string& body, bool backwards, size_t words = kThreads,
                      Guarded::Page page = Guarded::Page::kBehind) {
  const testing::EmulatedKernels kernels(
      {{"by_hand",
        "extern \"C\" __global__ void by_hand(const long* table, int calls, int stage) {\n"
        "alignas(16) extern __shared__ long scratch[];\n"
        "long* const made = (long*)table[0];\n"
        "const int x = threadIdx.x;\n" +
            body + "}\n"}});
  const Guarded made("the result", words * sizeof(long), page);
  const auto* const data = reinterpret_cast<const long*>(made.data());
  const std::vector<long> table{reinterpret_cast<long>(data)};
  kernels.run("by_hand", {1, kThreads, 1, {}, kThreads * sizeof(long)}, table.data(), 1, -1,
              backwards);
  return {data, data + words};
}

// What is thrown, or nothing.
std::string problem(const std::string& body, size_t words = kThreads,
                    Guarded::Page page = Guarded::Page::kBehind) {
  try {
    run(body, false, words, page);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

class CudaEmulator : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "sanitizers do not know fibers";
#endif
  }
};

// Lanes read what others wrote, and write again what others have read.
TEST_F(CudaEmulator, LanesWaitForTheirWarp) {
  const std::string write = "scratch[x] = 3 * x;\n";
  const std::string read = "long v = scratch[(x & 32) + (x + 1) % 32];\n";
  const std::string rewrite = "scratch[x] = v; made[x] = v;\n";
  const std::string wait = "__syncwarp();\n";
  std::vector<long> expected;
  for (long x = 0; x < kThreads; ++x) expected.push_back(3 * ((x & 32) + (x + 1) % 32));
  const auto is_right = [&](const std::string& body) {
    return run(body, false) == expected && run(body, true) == expected;
  };
  EXPECT_TRUE(is_right(write + wait + read + wait + rewrite));
  EXPECT_TRUE(is_right(write + "__syncwarp(x % 2 ? 0xaaaaaaaau : 0x55555555u);\n" + wait + read +
                       wait + rewrite));
  EXPECT_FALSE(is_right(write + read + wait + rewrite));
  EXPECT_FALSE(is_right(write + wait + read + rewrite));
}

TEST_F(CudaEmulator, LanesThatWaitForNoneAreSeen) {
  EXPECT_EQ(problem("if (x != 5) __syncwarp();\n"),
            "by_hand: not all threads of a block reach a barrier or an exchange");
  EXPECT_EQ(problem("__syncwarp(0xffffff7fu);\n"),
            "by_hand: a lane takes part in an exchange whose mask leaves it out");
  const std::string elsewhere =
      "by_hand: the lanes of a warp wait for each other in different places";
  EXPECT_EQ(problem("if (x % 32 < 16) __syncwarp();\nelse __shfl_xor_sync(~0u, x, 1);\n"),
            elsewhere);
  EXPECT_EQ(problem("__syncwarp(x % 32 < 16 ? ~0u : 0xffff0000u);\n"), elsewhere);
}

// Though the value goes nowhere; and the emulator goes on afterwards.
TEST_F(CudaEmulator, MemoryThatIsNotThereIsNamed) {
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(problem("const long dropped = made[x];\n", 63),
              "by_hand: a thread touches 0 bytes behind the result, which has 504");
    EXPECT_EQ(problem("const long dropped = made[-1];\n", 8, Guarded::Page::kBefore),
              "by_hand: a thread touches 8 bytes before the result, which has 64");
    EXPECT_EQ(problem("made[x + 1] = 7;\n"),
              "by_hand: a thread touches 0 bytes behind the result, which has 512");
    EXPECT_EQ(problem("*(int*)0 = 7;\n"), "by_hand: a thread touches memory that is not there");
    EXPECT_EQ(problem("made[x] = 7;\n"), "");
  }
}

TEST(Guarded, EndsOrBeginsAtThePage) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto at = [](const Guarded& memory) { return reinterpret_cast<size_t>(memory.data()); };
  for (const size_t bytes : {size_t{1}, size_t{12}, size_t{64}, page - 1, page, 3 * page + 4}) {
    const Guarded ends("", bytes, Guarded::Page::kBehind);
    EXPECT_EQ((at(ends) + bytes) % page, 0U);
    const Guarded begins("", bytes, Guarded::Page::kBefore);
    EXPECT_EQ(at(begins) % page, 0U);
    for (const size_t place : {0, 4, 15}) {
      const Guarded near_end("", bytes, Guarded::Page::kBehind, place);
      EXPECT_EQ(at(near_end) % 16, place);
      EXPECT_LT(page - 1 - (at(near_end) + bytes - 1) % page, 16U);
      const Guarded near_begin("", bytes, Guarded::Page::kBefore, place);
      EXPECT_EQ(at(near_begin) % page, place);
      EXPECT_TRUE(near_begin.is_intact());
      near_begin.data()[bytes] = 'x';
      EXPECT_FALSE(near_begin.is_intact());
    }
  }
}

}  // namespace
}  // namespace acc
