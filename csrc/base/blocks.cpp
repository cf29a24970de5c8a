#include "csrc/base/blocks.h"

#include <iterator>

#include "csrc/base/check.h"

namespace acc::base {

Blocks::Blocks(uint64_t capacity) {
  ACC_CHECK(capacity % kAlignment == 0);
  if (capacity > 0) add_gap(0, capacity);
}

void Blocks::add_gap(uint64_t offset, uint64_t bytes) {
  gaps_.emplace(offset, bytes);
  gap_sizes_.emplace(bytes, offset);
}

std::optional<uint64_t> Blocks::take(uint64_t bytes) {
  const uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded == 0) return std::nullopt;  // nothing, or more than there are numbers
  const auto found = gap_sizes_.lower_bound({rounded, 0});
  if (found == gap_sizes_.end()) return std::nullopt;
  const auto [room, offset] = *found;
  gap_sizes_.erase(found);
  gaps_.erase(offset);
  if (room > rounded) add_gap(offset + rounded, room - rounded);
  taken_.emplace(offset, rounded);
  used_ += rounded;
  return offset;
}

void Blocks::give(uint64_t offset) {
  const auto block = taken_.find(offset);
  ACC_CHECK(block != taken_.end());
  uint64_t begin = offset;
  uint64_t bytes = block->second;
  used_ -= bytes;
  taken_.erase(block);
  auto next = gaps_.lower_bound(begin);
  if (next != gaps_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      gap_sizes_.erase({previous->second, previous->first});
      gaps_.erase(previous);
    }
  }
  if (next != gaps_.end() && begin + bytes == next->first) {
    bytes += next->second;
    gap_sizes_.erase({next->second, next->first});
    gaps_.erase(next);
  }
  add_gap(begin, bytes);
}

}  // namespace acc::base
