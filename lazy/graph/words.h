#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

// The encoding of a node's arguments and results as 64-bit words.
//
// Each item begins with a tag word: bits 0-7 the tag, 8-15 the element type, 16-23 flags, 32-63 a
// count. An item whose role is `kValue` carries kValueFlag and no payload; its payload stands in
// the value block. Payloads:
//   kTensor       buffer, offset in elements, then `count` sizes, then `count` strides
//   kNumber       one word (two for complex): a CPU tensor of no dimension; flag: wrapped number
//   kInt kFloat kBool   one word          kComplex   two words
//   kList         `count` items           kString    count bytes, padded to words
//   kNone kUndefined kDevice   nothing
namespace acc::graph {

enum class Tag : uint8_t {
  kNone,
  kUndefined,
  kTensor,
  kNumber,
  kInt,
  kFloat,
  kBool,
  kComplex,
  kList,
  kString,
  kDevice,
};

inline constexpr uint8_t kValueFlag = 1;    // the payload is in the value block
inline constexpr uint8_t kWrappedFlag = 2;  // kNumber: came from a Python number
inline constexpr uint8_t kConjFlag = 4;     // kTensor: lazily conjugated
inline constexpr uint8_t kNegFlag = 8;      // kTensor: lazily negated

constexpr int64_t make_tag(Tag tag, uint8_t dtype = 0, uint8_t flags = 0, uint64_t count = 0) {
  return static_cast<int64_t>(static_cast<uint64_t>(tag) | static_cast<uint64_t>(dtype) << 8 |
                              static_cast<uint64_t>(flags) << 16 | count << 32);
}
constexpr Tag tag_of(int64_t word) { return static_cast<Tag>(word & 0xff); }
constexpr uint8_t dtype_of(int64_t word) { return static_cast<uint8_t>(word >> 8); }
constexpr uint8_t flags_of(int64_t word) { return static_cast<uint8_t>(word >> 16); }
constexpr uint32_t count_of(int64_t word) {
  return static_cast<uint32_t>(static_cast<uint64_t>(word) >> 32);
}

// A tensor as the words describe it. The spans point into the words.
struct TensorWords {
  uint32_t buffer;
  uint8_t dtype;
  uint8_t flags;
  int64_t offset;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
};

inline TensorWords read_tensor(const int64_t* word) {
  const uint32_t dims = count_of(*word);
  return {
      static_cast<uint32_t>(word[1]), dtype_of(*word), flags_of(*word), word[2], {word + 3, dims},
      {word + 3 + dims, dims}};
}

// Number of words of the item at `word`, nested items included.
uint32_t item_words(const int64_t* word);

// The items that follow each other in `words`, each by its tag word.
std::vector<const int64_t*> items(std::span<const int64_t> words);

// Calls `each` with the tag word of every tensor in `words`, those in lists included.
template <class Word, class Each>
void for_each_tensor(Word* word, std::type_identity_t<const Word*> end, const Each& each) {
  while (word != end) {
    const Tag tag = tag_of(*word);
    if (tag == Tag::kTensor) each(word);
    // The items of a list follow it as those of the call do.
    word += tag == Tag::kList ? 1 : item_words(word);
  }
}

// Number of entries that the item at `word` takes in the value block.
uint32_t item_values(const int64_t* word);

// The tag of the kNumber that a scalar of tag `word` is among tensors; other tags are unchanged.
int64_t as_number(int64_t word);

// Bytes per element of the dtype number that the words hold (c10's numbering).
uint32_t element_bytes(uint8_t dtype);

// Name of that dtype, for printing ("f32").
const char* dtype_name(uint8_t dtype);

}  // namespace acc::graph
