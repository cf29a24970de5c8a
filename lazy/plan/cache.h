#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"

namespace acc::plan {

// Owns values under a hash, up to a number of bytes; what was not used for longest goes first.
//
// The hash alone never decides: several values may share one, and the caller's predicate tells
// which is meant. A missing value is a null pointer, never an error. Pointers to values stay good
// until the value is evicted, erased or cleared; `pin` prevents eviction.
//
// Not thread safe; one owner, or a lock around it. Neither the predicate nor the eviction callback
// may call back into the cache.
template <class Value>
class LruCache {
 public:
  // Called for each value that is evicted for its bytes, before it is destroyed.
  using OnEvict = std::function<void(Value& value, uint64_t bytes)>;

  explicit LruCache(uint64_t max_bytes, OnEvict on_evict = nullptr)
      : max_bytes_(max_bytes), on_evict_(std::move(on_evict)) {}
  LruCache(const LruCache&) = delete;
  LruCache& operator=(const LruCache&) = delete;

  // The value under `hash` for which equal(const Value&) holds, now the most recently used one;
  // nullptr if there is none.
  template <class Equal>
  Value* find(const base::Hash128& hash, Equal&& equal) {
    const auto [begin, end] = by_hash_.equal_range(hash);
    for (auto found = begin; found != end; ++found) {
      const Position position = found->second;
      if (!equal(static_cast<const Value&>(*position->value))) continue;
      entries_.splice(entries_.begin(), entries_, position);
      return position->value.get();
    }
    return nullptr;
  }

  // Adds a value as the most recently used one, then evicts down to the limit. The new value itself
  // stays, even if it alone is above the limit. The caller has made sure that no equal one is here.
  Value* insert(const base::Hash128& hash, std::unique_ptr<Value> value, uint64_t bytes) {
    ACC_CHECK(value != nullptr);
    Value* const result = value.get();
    entries_.push_front({hash, std::move(value), bytes, 0});
    by_hash_.emplace(hash, entries_.begin());
    by_value_.emplace(result, entries_.begin());
    bytes_ += bytes;
    trim(result);
    return result;
  }

  // A pinned value is not evicted, erased or cleared. Pins are counted. Unpinning evicts nothing by
  // itself, so the pointer stays good until the next insert, set_bytes, measure or set_max_bytes.
  void pin(const Value* value) { ++entry(value).pins; }
  void unpin(const Value* value) {
    Entry& found = entry(value);
    ACC_CHECK(found.pins > 0);
    --found.pins;
  }
  bool pinned(const Value* value) { return entry(value).pins > 0; }

  // The value has grown or shrunk; evicts others if that takes the sum above the limit.
  void set_bytes(const Value* value, uint64_t bytes) {
    Entry& found = entry(value);
    bytes_ = bytes_ - found.bytes + bytes;
    found.bytes = bytes;
    trim(value);
  }

  // All may have grown or shrunk: asks size(const Value&) of each. Then evicts down to the limit,
  // but not the most recently used one.
  template <class Size>
  void measure(Size&& size) {
    bytes_ = 0;
    for (Entry& each : entries_) {
      each.bytes = size(static_cast<const Value&>(*each.value));
      bytes_ += each.bytes;
    }
    trim(entries_.empty() ? nullptr : entries_.front().value.get());
  }

  void set_max_bytes(uint64_t max_bytes) {
    max_bytes_ = max_bytes;
    trim(nullptr);
  }

  // Removes one value, without the callback.
  void erase(const Value* value) {
    ACC_CHECK(entry(value).pins == 0);
    remove(by_value_.at(value));
  }

  // Removes every value that is not pinned, without the callback.
  void clear() {
    for (Position position = entries_.begin(); position != entries_.end();) {
      const Position next = std::next(position);
      if (position->pins == 0) remove(position);
      position = next;
    }
  }

  // Visits the values, the most recently used first, as visit(const Value&, bytes); not a use.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const Entry& each : entries_) visit(static_cast<const Value&>(*each.value), each.bytes);
  }

  size_t size() const { return entries_.size(); }
  uint64_t bytes() const { return bytes_; }
  uint64_t max_bytes() const { return max_bytes_; }

 private:
  struct Entry {
    base::Hash128 hash;
    std::unique_ptr<Value> value;
    uint64_t bytes;
    uint32_t pins;
  };
  using Position = typename std::list<Entry>::iterator;

  Entry& entry(const Value* value) {
    const auto found = by_value_.find(value);
    ACC_CHECK(found != by_value_.end());
    return *found->second;
  }

  // Returns the value, for whoever wants to see it before it goes.
  std::unique_ptr<Value> remove(Position position) {
    auto [found, end] = by_hash_.equal_range(position->hash);
    while (found != end && found->second != position) ++found;
    ACC_CHECK(found != end);
    by_hash_.erase(found);
    by_value_.erase(position->value.get());
    bytes_ -= position->bytes;
    std::unique_ptr<Value> value = std::move(position->value);
    entries_.erase(position);
    return value;
  }

  void trim(const Value* keep) {
    for (Position position = entries_.end(); bytes_ > max_bytes_ && position != entries_.begin();) {
      const Position candidate = std::prev(position);
      if (candidate->pins > 0 || candidate->value.get() == keep) {
        position = candidate;
        continue;
      }
      const uint64_t bytes = candidate->bytes;
      const std::unique_ptr<Value> evicted = remove(candidate);
      if (on_evict_) on_evict_(*evicted, bytes);
    }
  }

  std::list<Entry> entries_;  // the most recently used first
  std::unordered_multimap<base::Hash128, Position, base::Hash128Bucket> by_hash_;
  std::unordered_map<const Value*, Position> by_value_;
  uint64_t bytes_ = 0;
  uint64_t max_bytes_;
  OnEvict on_evict_;
};

}  // namespace acc::plan
