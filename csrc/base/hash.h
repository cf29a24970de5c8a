#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

// Stable hashes: the same input gives the same result in every process and on every machine. Not
// for adversaries: whoever uses a hash as a key compares in full on a hit.
//
// The state is two words (a, b). One word of input is xor-ed into `a`; then a is multiplied by an
// odd constant to 128 bits, the high half is xor-ed into b, and the halves change places. Each such
// round is a bijection of the state, so two inputs can only meet when later words cancel the
// difference that an earlier one spread over both halves; no value of the input erases the state,
// as a zero factor does where both factors of a multiplication come from the input. The xor
// matters: with an addition there the whole would be linear over the integers, and mix badly. From
// four rounds on every bit of the state depends evenly on every bit of a word.
namespace acc::base {

struct Hash128 {
  uint64_t lo = 0;
  uint64_t hi = 0;

  friend constexpr bool operator==(const Hash128&, const Hash128&) = default;
};

// For unordered containers keyed by Hash128, whose bits are mixed already.
struct Hash128Bucket {
  size_t operator()(const Hash128& hash) const noexcept { return static_cast<size_t>(hash.lo); }
};

// 32 lower-case hexadecimal digits, hi first.
inline std::string to_hex(const Hash128& hash) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(32, '0');
  for (int i = 0; i < 16; ++i) {
    text[15 - i] = kDigits[(hash.hi >> (4 * i)) & 15];
    text[31 - i] = kDigits[(hash.lo >> (4 * i)) & 15];
  }
  return text;
}

namespace detail {

__extension__ typedef unsigned __int128 uint128;

// The fractional parts of the square roots of 2, 3, 5, 7, 11 and 13 in 64 bits, made odd: dense in
// ones and zeros, unrelated to each other, and nothing up the sleeve.
inline constexpr uint64_t kRoot2 = 0x6a09e667f3bcc909;
inline constexpr uint64_t kRoot3 = 0xbb67ae8584caa73b;
inline constexpr uint64_t kRoot5 = 0x3c6ef372fe94f82b;
inline constexpr uint64_t kRoot7 = 0xa54ff53a5f1d36f1;
inline constexpr uint64_t kRoot11 = 0x510e527fade682d1;
inline constexpr uint64_t kRoot13 = 0x9b05688c2b3e6c1f;

struct HashState {
  uint64_t a = kRoot2;
  uint64_t b = kRoot3;

  constexpr void round(uint64_t word, uint64_t factor) {
    const uint128 product = static_cast<uint128>(a ^ word) * factor;
    a = b ^ static_cast<uint64_t>(product >> 64);
    b = static_cast<uint64_t>(product);
  }

  // Words in order through one chain: the latency of a multiplication per word.
  constexpr void chain(const uint64_t* words, size_t n) {
    for (size_t i = 0; i < n; ++i) round(words[i], kRoot5);
  }

  // Four chains side by side hide that latency; they are joined at the end.
  constexpr void wide(const uint64_t* words, size_t n) {
    HashState lane1{b ^ kRoot7, a};
    HashState lane2{a ^ kRoot11, b};
    HashState lane3{b ^ kRoot13, a};
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
      round(words[i], kRoot5);
      lane1.round(words[i + 1], kRoot7);
      lane2.round(words[i + 2], kRoot11);
      lane3.round(words[i + 3], kRoot13);
    }
    chain(words + i, n - i);
    for (const HashState& lane : {lane1, lane2, lane3}) {
      round(lane.a, kRoot11);
      round(lane.b, kRoot13);
    }
  }

  // Below this, joining four chains costs more than it saves.
  static constexpr size_t kWide = 12;

  constexpr void words(const uint64_t* data, size_t n) {
    n < kWide ? chain(data, n) : wide(data, n);
  }

  constexpr void finish() {
    for (const uint64_t factor : {kRoot3, kRoot7, kRoot11, kRoot13}) round(0, factor);
  }
};

// The low `bytes` bytes of a little-endian word; bytes <= 8.
inline uint64_t load_bytes(const unsigned char* data, size_t bytes) {
  uint64_t word = 0;
  if (bytes == 8 && std::endian::native == std::endian::little) {
    std::memcpy(&word, data, 8);
    return word;
  }
  for (size_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(data[i]) << (8 * i);
  return word;
}

}  // namespace detail

// A 128-bit hash of a sequence of items. An item is one value, one run of words, or one run of
// bytes; the length of a run is part of it, so that where a run ends matters: ("ab", "c") and
// ("a", "bc") differ, and so do a run of one word and the word alone.
class Hasher {
 public:
  // Integers (signed ones are sign-extended, so that an int32_t hashes as the equal int64_t),
  // bools, enums.
  template <class T>
    requires std::is_integral_v<T> || std::is_enum_v<T>
  constexpr void add(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    state_.round(static_cast<uint64_t>(value), detail::kRoot7);
    ++items_;
  }

  // By bits: 0.0 and -0.0 differ, and a NaN equals itself.
  constexpr void add(std::same_as<double> auto value) { add(std::bit_cast<uint64_t>(value)); }
  constexpr void add(std::same_as<float> auto value) { add(std::bit_cast<uint32_t>(value)); }

  // A run of `n` words, the fast path.
  constexpr void add(const uint64_t* words, size_t n) {
    state_.words(words, n);
    state_.round(n, detail::kRoot13);
    ++items_;
  }
  // Sizes and strides are signed; they hash as the unsigned words with the same bits.
  void add(const int64_t* words, size_t n) { add(reinterpret_cast<const uint64_t*>(words), n); }

  // A run of `bytes` bytes.
  void add(const void* data, size_t bytes) {
    const auto* next = static_cast<const unsigned char*>(data);
    const size_t whole = bytes / 8;
    for (size_t i = 0; i < whole; ++i, next += 8) {
      state_.round(detail::load_bytes(next, 8), detail::kRoot5);
    }
    if (bytes % 8 != 0) state_.round(detail::load_bytes(next, bytes % 8), detail::kRoot5);
    state_.round(bytes, detail::kRoot11);
    ++items_;
  }
  void add(std::string_view text) { add(static_cast<const void*>(text.data()), text.size()); }

  // A pointer to anything else with a count is a mistake: is it a count of bytes or of elements?
  template <class T>
    requires(!std::is_void_v<T> && !std::same_as<T, uint64_t> && !std::same_as<T, int64_t>)
  void add(const T* data, size_t n) = delete;

  constexpr void add(const Hash128& hash) {
    state_.round(hash.lo, detail::kRoot11);
    state_.round(hash.hi, detail::kRoot7);
    ++items_;
  }

  // The hash of what was added until now. More may be added afterwards.
  constexpr Hash128 finish() const {
    detail::HashState state = state_;
    state.round(items_, detail::kRoot2);
    state.finish();
    return {state.a, state.b ^ state.a};
  }

 private:
  detail::HashState state_;
  uint64_t items_ = 0;
};

// A 64-bit hash of a run of words for tables in memory. Not related to Hasher's result.
constexpr uint64_t hash64(const uint64_t* words, size_t n) {
  detail::HashState state;
  state.words(words, n);
  state.round(n, detail::kRoot2);
  state.finish();
  return state.a ^ state.b;
}

}  // namespace acc::base
