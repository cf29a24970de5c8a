#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace acc::base {

// Cuts a range of `capacity` bytes into blocks, as numbers only. A block goes where it fits most
// closely, at the lowest such place; freed neighbours become one. So what was used before is used
// again first, and the range is touched no further than needed. Not thread safe.
class Blocks {
 public:
  static constexpr uint64_t kAlignment = 512;

  // `capacity` is a multiple of kAlignment.
  explicit Blocks(uint64_t capacity);

  // The offset of a new block, a multiple of kAlignment; nothing when none fits.
  std::optional<uint64_t> take(uint64_t bytes);
  // Ends the block at `offset`, which `take` returned.
  void give(uint64_t offset);

  // Bytes in blocks, rounded up to kAlignment.
  uint64_t used() const { return used_; }

  // Calls visit(offset, bytes) for the gaps between and after the blocks.
  template <class Visit>
  void for_each_gap(const Visit& visit) const {
    for (const auto& [offset, bytes] : gaps_) visit(offset, bytes);
  }

 private:
  void add_gap(uint64_t offset, uint64_t bytes);

  std::map<uint64_t, uint64_t> taken_;                 // offset -> bytes
  std::map<uint64_t, uint64_t> gaps_;                  // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> gap_sizes_;  // bytes, offset
  uint64_t used_ = 0;
};

}  // namespace acc::base
