#include "lazy/graph/words.h"

#include <array>

#include "csrc/base/check.h"

namespace acc::graph {
namespace {

struct Dtype {
  const char* name;
  uint32_t bytes;
};

// Indexed by c10::ScalarType, whose numbers are part of PyTorch's serialisation format and so
// never change. `csrc/aten` asserts that the sizes agree with the torch it is built against.
constexpr std::array<Dtype, 29> kDtypes{{
    {"u8", 1},         {"i8", 1},         {"i16", 2},    {"i32", 4},     {"i64", 8},
    {"f16", 2},        {"f32", 4},        {"f64", 8},    {"c32", 4},     {"c64", 8},
    {"c128", 16},      {"bool", 1},       {"qi8", 1},    {"qu8", 1},     {"qi32", 4},
    {"bf16", 2},       {"qu4x2", 1},      {"qu2x4", 1},  {"bits1x8", 1}, {"bits2x4", 1},
    {"bits4x2", 1},    {"bits8", 1},      {"bits16", 2}, {"f8e5m2", 1},  {"f8e4m3fn", 1},
    {"f8e5m2fnuz", 1}, {"f8e4m3fnuz", 1}, {"u16", 2},    {"u32", 4},
}};

const Dtype& dtype_entry(uint8_t number) {
  static constexpr Dtype kU64{"u64", 8};
  static constexpr Dtype kOther{"byte", 1};
  if (number < kDtypes.size()) return kDtypes[number];
  return number == 29 ? kU64 : kOther;
}

uint32_t scalar_words(Tag tag, uint8_t dtype_number) {
  switch (tag) {
    case Tag::kInt:
    case Tag::kFloat:
    case Tag::kBool:
      return 1;
    case Tag::kComplex:
      return 2;
    case Tag::kNumber:
      // c64 and c128 keep both parts as doubles.
      return dtype_number >= 8 && dtype_number <= 10 ? 2 : 1;
    default:
      return 0;
  }
}

}  // namespace

uint32_t item_words(const int64_t* word) {
  const Tag tag = tag_of(*word);
  const uint32_t count = count_of(*word);
  switch (tag) {
    case Tag::kNone:
    case Tag::kUndefined:
    case Tag::kDevice:
      return 1;
    case Tag::kTensor:
      return 3 + 2 * count;
    case Tag::kString:
      return 1 + (count + 7) / 8;
    case Tag::kList: {
      uint32_t words = 1;
      for (uint32_t i = 0; i < count; ++i) words += item_words(word + words);
      return words;
    }
    default:
      return flags_of(*word) & kValueFlag ? 1 : 1 + scalar_words(tag, dtype_of(*word));
  }
}

std::vector<const int64_t*> items(std::span<const int64_t> words) {
  std::vector<const int64_t*> found;
  for (; !words.empty(); words = words.subspan(item_words(words.data()))) {
    found.push_back(words.data());
  }
  return found;
}

uint32_t item_values(const int64_t* word) {
  const Tag tag = tag_of(*word);
  if (tag == Tag::kList) {
    uint32_t words = 1;
    uint32_t values = 0;
    for (uint32_t i = 0; i < count_of(*word); ++i) {
      values += item_values(word + words);
      words += item_words(word + words);
    }
    return values;
  }
  if (!(flags_of(*word) & kValueFlag)) return 0;
  return scalar_words(tag, dtype_of(*word));
}

int64_t as_number(int64_t word) {
  constexpr uint8_t kLong = 4;
  constexpr uint8_t kDouble = 7;
  constexpr uint8_t kComplexDouble = 10;
  constexpr uint8_t kBool = 11;
  const auto number = [word](uint8_t dtype) {
    return make_tag(Tag::kNumber, dtype, flags_of(word) | kWrappedFlag);
  };
  switch (tag_of(word)) {
    case Tag::kInt:
      return number(kLong);
    case Tag::kFloat:
      return number(kDouble);
    case Tag::kComplex:
      return number(kComplexDouble);
    case Tag::kBool:
      return number(kBool);
    default:
      return word;
  }
}

uint32_t element_bytes(uint8_t number) { return dtype_entry(number).bytes; }

const char* dtype_name(uint8_t number) { return dtype_entry(number).name; }

}  // namespace acc::graph
