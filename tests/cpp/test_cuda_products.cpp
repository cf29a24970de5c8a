// Products with epilogues by cublasLt: what the library is told, against a library that only looks
// like it (cuda_fake_cublaslt.h) and does what it is told.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "kernels/library/cuda_products.h"
#include "tests/cpp/cuda_fake_cublaslt.h"

namespace acc {
namespace {

using library::Matrix;
using library::Product;
using library::Products;
using testing::fake_cublaslt;

constexpr int64_t kRows = 5;
constexpr int64_t kTerms = 3;
constexpr int64_t kColumns = 8;

std::vector<float> numbers(size_t count, unsigned seed) {
  std::vector<float> made(count);
  for (float& each : made) {
    seed = seed * 1664525U + 1013904223U;
    each = static_cast<float>(seed >> 8) / static_cast<float>(1U << 23) - 1;
  }
  return made;
}

// Dense, transposed, with gaps between rows, both.
std::vector<Matrix> layouts(int64_t rows, int64_t columns) {
  return {{rows, columns, columns, 1},
          {rows, columns, 1, rows},
          {rows, columns, columns + 2, 1},
          {rows, columns, 1, rows + 3}};
}

double at(const std::vector<float>& data, const Matrix& m, int64_t row, int64_t column) {
  return data[static_cast<size_t>(row * m.row_stride + column * m.column_stride)];
}

double product(const std::vector<float>& x, const Matrix& left, const std::vector<float>& y,
               const Matrix& right, int64_t row, int64_t column) {
  double sum = 0;
  for (int64_t k = 0; k < left.columns; ++k) sum += at(x, left, row, k) * at(y, right, k, column);
  return sum;
}

double one_second(const std::function<bool()>& call) {
  return call() ? 1 : std::numeric_limits<double>::infinity();
}

struct CudaProducts : ::testing::Test {
  void SetUp() override { fake_cublaslt() = {}; }

  Products products;
  std::vector<float> x = numbers(128, 1), y = numbers(128, 2);
  std::vector<float> made = std::vector<float>(kRows * kColumns);
  std::vector<float> bias = numbers(kColumns, 3);
  std::vector<float> aux = numbers(kRows * kColumns, 4);

  bool make(
      const Product& product, Products::Choice choice = Products::Choice::kFirst,
      const Products::Clock& clock = nullptr,
      const std::function<bool()>& instead = [] { return true; }) {
    return products.make(product, {y.data(), x.data(), made.data(), bias.data(), aux.data()},
                         {.workspace_bytes = 1 << 20}, choice, clock, instead);
  }
  // Tried at the second call. `instead_s`: what the clock says of the last that it is asked for.
  bool make_twice(
      const Products::Clock& clock, const std::function<bool()>& instead = [] { return true; },
      double instead_s = 0) {
    int calls = 0;
    const auto count = [&](const std::function<bool()>& call) {
      const double seconds = clock(call);
      return ++calls == 4 && instead_s > 0 ? instead_s : seconds;
    };
    make(plain(), Products::Choice::kTried, count, instead);
    return make(plain(), Products::Choice::kTried, count, instead);
  }
  Product plain(cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT) const {
    return *library::product_of({kRows, kTerms, kTerms, 1}, {kTerms, kColumns, kColumns, 1},
                                epilogue);
  }

  // Calls `check(element, row, column, left @ right)` for each layout of the two.
  template <class Check>
  void in_all_layouts(cublasLtEpilogue_t epilogue, const Check& check) {
    for (const Matrix& left : layouts(kRows, kTerms)) {
      for (const Matrix& right : layouts(kTerms, kColumns)) {
        const auto product_made = library::product_of(left, right, epilogue);
        ASSERT_TRUE(product_made.has_value());
        ASSERT_TRUE(make(*product_made));
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t column = 0; column < kColumns; ++column) {
            const auto element = static_cast<size_t>(row * kColumns + column);
            check(element, row, column, product(x, left, y, right, row, column), left);
          }
        }
      }
    }
  }
};

TEST_F(CudaProducts, MultiplyInEveryLayout) {
  in_all_layouts(CUBLASLT_EPILOGUE_DEFAULT,
                 [&](size_t element, int64_t, int64_t, double expected, const Matrix&) {
                   EXPECT_NEAR(made[element], expected, 1e-5);
                 });
}

TEST_F(CudaProducts, TheGeluOfALayerAndWhatItIsOf) {
  in_all_layouts(CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                 [&](size_t element, int64_t, int64_t column, double expected, const Matrix&) {
                   const double before = expected + bias[static_cast<size_t>(column)];
                   EXPECT_NEAR(aux[element], before, 1e-5);
                   EXPECT_NEAR(made[element], testing::gelu(before), 1e-5);
                 });
}

TEST_F(CudaProducts, TheBackwardOfAGelu) {
  in_all_layouts(CUBLASLT_EPILOGUE_DGELU,
                 [&](size_t element, int64_t, int64_t, double expected, const Matrix&) {
                   EXPECT_NEAR(made[element], expected * testing::gelu_slope(aux[element]), 1e-5);
                 });
}

TEST_F(CudaProducts, TheSumOfTheLeftMatrix) {
  bias.assign(kRows, 0);
  in_all_layouts(CUBLASLT_EPILOGUE_BGRADB,
                 [&](size_t element, int64_t row, int64_t, double expected, const Matrix& left) {
                   double sum = 0;
                   for (int64_t k = 0; k < kTerms; ++k) sum += at(x, left, row, k);
                   EXPECT_NEAR(bias[static_cast<size_t>(row)], sum, 1e-5);
                   EXPECT_NEAR(made[element], expected, 1e-5);
                 });
}

TEST_F(CudaProducts, WhatTheLibraryCannotDoIsNone) {
  const Matrix left{kRows, kTerms, kTerms, 1};
  const Matrix right{kTerms, kColumns, kColumns, 1};
  const auto none = [](const Matrix& a, const Matrix& b, cublasLtEpilogue_t epilogue) {
    return !library::product_of(a, b, epilogue).has_value();
  };
  const Matrix narrow{kTerms, 6, 6, 1};  // the other matrix of an epilogue needs multiples of 8
  EXPECT_TRUE(none(left, narrow, CUBLASLT_EPILOGUE_DGELU));
  EXPECT_FALSE(none(left, narrow, CUBLASLT_EPILOGUE_BGRADB));
  EXPECT_TRUE(none({kRows, kTerms, 2 * kTerms, 2}, right, CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_TRUE(none({kRows, kTerms, 0, 1}, right, CUBLASLT_EPILOGUE_DEFAULT));  // rows overlap
  EXPECT_TRUE(none({0, kTerms, kTerms, 1}, right, CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_TRUE(none({1, kTerms, kTerms, 1}, right, CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_TRUE(none({kRows, 1, 1, 1}, {1, kColumns, kColumns, 1}, CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_TRUE(none(left, {kTerms, 0, 1, 1}, CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_TRUE(none(left, {kTerms, 1, 1, 1}, CUBLASLT_EPILOGUE_DEFAULT));
}

TEST_F(CudaProducts, TheFirstAlgorithmIsAskedForOnce) {
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(make(plain()));
  EXPECT_EQ(fake_cublaslt().asked, 1);
  EXPECT_EQ(fake_cublaslt().run, (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(fake_cublaslt().workspace, 1U << 20);
  Product other = plain();
  other.reduction_schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
  EXPECT_TRUE(make(other));
  EXPECT_EQ(fake_cublaslt().asked, 2);
  EXPECT_EQ(fake_cublaslt().reduction_mask, CUBLASLT_REDUCTION_SCHEME_NONE);
}

TEST_F(CudaProducts, MatricesAlignedInAnotherWayAreAskedForAnew) {
  std::vector<float> room = numbers(512, 5);
  float* aligned = room.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 64 != 0) ++aligned;
  const auto make_at = [&](int64_t a, int64_t b, int64_t bias) {
    EXPECT_TRUE(products.make(
        plain(), {aligned + a, aligned + 96 + b, aligned + 192, aligned + 320 + bias, nullptr}, {},
        Products::Choice::kFirst, nullptr, [] { return true; }));
    return fake_cublaslt().asked;
  };
  EXPECT_EQ(make_at(0, 1, 0), 1);
  EXPECT_EQ(fake_cublaslt().alignments[1], 4U);
  EXPECT_EQ(make_at(1, 0, 0), 2);  // none of what the other order was given
  EXPECT_EQ(fake_cublaslt().alignments[0], 4U);
  EXPECT_EQ(make_at(0, 1, 0), 2);
  EXPECT_EQ(make_at(0, 0, 4), 3);  // where the bias lies the library sees by its address
  EXPECT_EQ(make_at(0, 0, 0), 4);
  EXPECT_EQ(fake_cublaslt().run, (std::vector<int>{0, 0, 0, 0, 0}));
}

// Memory that is aligned to so many bytes and not to more, as a view of flattened parameters is.
struct Aligned {
  explicit Aligned(size_t bytes) {
    void* at = room.data();
    size_t size = room.size() * sizeof(float);
    data = static_cast<float*>(std::align(512, 256, at, size)) + bytes / sizeof(float);
  }
  std::vector<float> room = numbers(512, 6);
  float* data;
};

// What an epilogue takes beside d, one of the two aligned to `bytes`; d to 256.
struct BesideD {
  BesideD(const CudaProducts& of, size_t bytes, bool is_bias)
      : less(bytes),
        matrices{of.y.data(), of.x.data(), d.data, is_bias ? less.data : more.data,
                 is_bias ? more.data : less.data} {}
  Aligned d{0}, more{0}, less;
  const library::Matrices matrices;
};

TEST_F(CudaProducts, WhatAnEpilogueTakesIsAlignedAsTheLibraryIsTold) {
  for (const size_t bytes : {16, 32}) {
    for (const bool is_bias : {true, false}) {
      const BesideD beside(*this, bytes, is_bias);
      EXPECT_TRUE(products.make(plain(CUBLASLT_EPILOGUE_GELU_AUX_BIAS), beside.matrices, {},
                                Products::Choice::kFirst, nullptr, [] { return true; }));
      EXPECT_EQ(fake_cublaslt().alignments[2], 256U);
      EXPECT_EQ(fake_cublaslt().alignments[3], bytes);
    }
  }
}

TEST_F(CudaProducts, WhatIsTakenInWordsIsNotTakenFromBetweenThem) {
  for (const size_t bytes : {4, 8}) {
    for (const bool is_bias : {true, false}) {
      const BesideD beside(*this, bytes, is_bias);
      for (const auto choice : {Products::Choice::kFirst, Products::Choice::kTried}) {
        const Product gelu = plain(CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
        EXPECT_TRUE(products.declines(gelu, beside.matrices, {}, choice));
        EXPECT_FALSE(
            products.make(gelu, beside.matrices, {}, choice, one_second, [] { return true; }));
      }
    }
  }
  EXPECT_TRUE(fake_cublaslt().run.empty());
}

TEST_F(CudaProducts, TheFirstThatRunsIsKept) {
  fake_cublaslt().refused = 0;
  EXPECT_TRUE(make(plain()));
  EXPECT_TRUE(make(plain()));
  EXPECT_EQ(fake_cublaslt().run, (std::vector<int>{0, 1, 1}));
  fake_cublaslt().refused = 1;
  EXPECT_TRUE(make(plain()));
  fake_cublaslt().refused = 2;
  EXPECT_FALSE(make(plain()));
  EXPECT_FALSE(make(plain()));
  EXPECT_EQ(fake_cublaslt().run, (std::vector<int>{0, 1, 1, 1, 2, 2}));
  EXPECT_EQ(fake_cublaslt().asked, 1);
}

TEST_F(CudaProducts, WhatWasTheFastestAndFailsIsNotMadeAnyMore) {
  make_twice(one_second);
  fake_cublaslt().refused = fake_cublaslt().run.back();
  EXPECT_FALSE(make(plain(), Products::Choice::kTried));
  fake_cublaslt().refused = -1;
  EXPECT_FALSE(make(plain(), Products::Choice::kTried));
}

TEST_F(CudaProducts, WhatIsDeclinedIsKnownBeforeThereIsRoomForIt) {
  const auto declined = [&](Products::Choice choice) {
    return products.declines(plain(), {y.data(), x.data(), made.data(), bias.data(), aux.data()},
                             {.workspace_bytes = 1 << 20}, choice);
  };
  EXPECT_FALSE(declined(Products::Choice::kFirst));
  EXPECT_FALSE(make_twice([](const auto& call) { return call() ? 1.0 : 2.0; }, [] { return true; },
                          /*instead_s=*/0.5));
  EXPECT_TRUE(declined(Products::Choice::kTried));
  EXPECT_FALSE(declined(Products::Choice::kFirst));
}

TEST_F(CudaProducts, WhatComesOnceIsNotTried) {
  int calls = 0;
  const auto clock = [&](const std::function<bool()>& call) {
    ++calls;
    return one_second(call);
  };
  EXPECT_TRUE(make(plain(), Products::Choice::kTried, clock));
  EXPECT_EQ(calls, 0);
  EXPECT_TRUE(make(plain(), Products::Choice::kTried, clock));
  EXPECT_EQ(calls, 4);
}

TEST_F(CudaProducts, WhereThereIsNoRoomForTheOtherWayItIsNotTaken) {
  EXPECT_TRUE(make_twice(one_second, [] { return false; }));
}

TEST_F(CudaProducts, TheFastestOfAllIsKept) {
  int calls = 0;
  const auto clock = [&](const std::function<bool()>& call) {
    call();
    return std::vector<double>{3, 1, 2, 5}.at(static_cast<size_t>(calls++));  // last: instead
  };
  EXPECT_TRUE(make_twice(clock));
  EXPECT_EQ(fake_cublaslt().run.back(), 1);
  EXPECT_TRUE(make(plain(), Products::Choice::kTried));  // as in a capture
  EXPECT_EQ(fake_cublaslt().run.back(), 1);
  EXPECT_EQ(calls, 4);
  EXPECT_TRUE(make(plain()));  // alike in all processes, whatever was tried
  EXPECT_EQ(fake_cublaslt().run.back(), 0);
}

TEST_F(CudaProducts, WhereTheOtherWayIsFasterItIsTaken) {
  bool instead_ran = false;
  int calls = 0;
  const auto clock = [&](const std::function<bool()>& call) {
    call();
    return ++calls == 4 ? 0.5 : 1.0;
  };
  const auto instead = [&] { return instead_ran = true; };
  EXPECT_FALSE(make_twice(clock, instead));
  EXPECT_TRUE(instead_ran);
  EXPECT_FALSE(make(plain(), Products::Choice::kTried, clock, instead));
  EXPECT_EQ(calls, 4);
}

TEST_F(CudaProducts, InACaptureWhatWasNotTriedIsTheFirstAndIsTriedLater) {
  EXPECT_TRUE(make(plain(), Products::Choice::kTried));
  EXPECT_EQ(fake_cublaslt().run.back(), 0);
  int calls = 0;
  const auto clock = [&](const std::function<bool()>& call) {
    call();
    return 5.0 - ++calls;
  };
  EXPECT_FALSE(make(plain(), Products::Choice::kTried, clock));  // `instead` was the fastest
  EXPECT_EQ(calls, 4);
}

TEST_F(CudaProducts, AlgorithmsThatFailAreNotChosen) {
  fake_cublaslt().refused = 0;
  EXPECT_TRUE(make_twice(one_second));
  EXPECT_EQ(fake_cublaslt().run.back(), 1);
}

TEST_F(CudaProducts, WithoutAnAlgorithmThereIsNone) {
  fake_cublaslt().algorithms = 0;
  EXPECT_FALSE(make(plain()));
  EXPECT_FALSE(make(plain(), Products::Choice::kTried, one_second));
  EXPECT_TRUE(fake_cublaslt().run.empty());
}

}  // namespace
}  // namespace acc
