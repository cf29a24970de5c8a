#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"
#include "lazy/plan/cache.h"

namespace acc::plan {
namespace {

using base::Hash128;

struct Item {
  explicit Item(std::string n) : name(std::move(n)) { ++alive; }
  ~Item() { --alive; }
  Item(const Item&) = delete;
  Item& operator=(const Item&) = delete;

  std::string name;
  static inline int alive = 0;
};

class Lru : public testing::Test {
 protected:
  void SetUp() override { Item::alive = 0; }

  Item* insert(const std::string& name, uint64_t bytes, Hash128 hash) {
    return cache.insert(hash, std::make_unique<Item>(name), bytes);
  }
  Item* insert(const std::string& name, uint64_t bytes) {
    return insert(name, bytes, hash_of(name));
  }
  Item* find(const std::string& name, Hash128 hash) {
    return cache.find(hash, [&name](const Item& item) { return item.name == name; });
  }
  Item* find(const std::string& name) { return find(name, hash_of(name)); }

  static Hash128 hash_of(const std::string& name) {
    base::Hasher hasher;
    hasher.add(name);
    return hasher.finish();
  }

  std::string names() const {
    std::string text;
    cache.for_each([&text](const Item& item, uint64_t) { text += item.name; });
    return text;
  }

  std::vector<std::pair<std::string, uint64_t>> evicted;
  LruCache<Item> cache{
      100, [this](Item& item, uint64_t bytes) { evicted.emplace_back(item.name, bytes); }};
};

using Evicted = std::vector<std::pair<std::string, uint64_t>>;

TEST_F(Lru, AMissIsANullPointer) {
  EXPECT_EQ(find("a"), nullptr);
  insert("a", 1);
  EXPECT_EQ(find("b"), nullptr);
}

TEST_F(Lru, FindsWhatWasInserted) {
  Item* a = insert("a", 10);
  Item* b = insert("b", 20);
  EXPECT_EQ(find("a"), a);
  EXPECT_EQ(find("b"), b);
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.bytes(), 30u);
}

TEST_F(Lru, ValuesWithOneHashAreToldApartByThePredicate) {
  const Hash128 same{1, 2};
  Item* a = insert("a", 1, same);
  Item* b = insert("b", 1, same);
  Item* c = insert("c", 1, same);
  EXPECT_EQ(find("a", same), a);
  EXPECT_EQ(find("b", same), b);
  EXPECT_EQ(find("c", same), c);
  EXPECT_EQ(find("d", same), nullptr);
  cache.erase(b);
  EXPECT_EQ(find("a", same), a);
  EXPECT_EQ(find("b", same), nullptr);
  EXPECT_EQ(find("c", same), c);
}

TEST_F(Lru, BothHalvesOfTheHashCount) {
  insert("a", 1, {1, 2});
  EXPECT_EQ(find("a", {1, 3}), nullptr);
  EXPECT_EQ(find("a", {3, 2}), nullptr);
  EXPECT_NE(find("a", {1, 2}), nullptr);
}

TEST_F(Lru, ThePredicateIsNotAskedAboutOtherHashes) {
  insert("a", 1, {1, 1});
  int asked = 0;
  const auto count = [&asked](const Item&) {
    ++asked;
    return false;
  };
  EXPECT_EQ(cache.find({1, 2}, count), nullptr);
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(cache.find({1, 1}, count), nullptr);
  EXPECT_EQ(asked, 1);
}

TEST_F(Lru, TheLeastRecentlyUsedGoesFirst) {
  insert("a", 40);
  insert("b", 40);
  find("a");
  insert("c", 40);
  EXPECT_EQ(names(), "ca");
  EXPECT_EQ(evicted, (Evicted{{"b", 40}}));
  EXPECT_EQ(find("b"), nullptr);
  EXPECT_EQ(cache.bytes(), 80u);
  EXPECT_EQ(Item::alive, 2);
}

TEST_F(Lru, AFailedFindIsNotAUse) {
  const Hash128 same{1, 2};
  insert("a", 40, same);
  insert("b", 40, {3, 4});
  find("x", same);
  insert("c", 40, {5, 6});
  EXPECT_EQ(names(), "cb");
}

TEST_F(Lru, ExactlyTheLimitFits) {
  insert("a", 50);
  insert("b", 50);
  EXPECT_EQ(evicted, Evicted());
  insert("c", 1);
  EXPECT_EQ(evicted, (Evicted{{"a", 50}}));
}

TEST_F(Lru, AsManyGoAsAreNeeded) {
  for (const char* name : {"a", "b", "c", "d"}) insert(name, 25);
  insert("e", 60);
  EXPECT_EQ(evicted, (Evicted{{"a", 25}, {"b", 25}, {"c", 25}}));
  EXPECT_EQ(names(), "ed");
}

TEST_F(Lru, TheNewestStaysEvenIfItAloneIsTooLarge) {
  insert("a", 10);
  Item* large = insert("large", 1000);
  EXPECT_EQ(find("large"), large);
  EXPECT_EQ(names(), "large");
  insert("b", 10);
  EXPECT_EQ(names(), "b");
}

TEST_F(Lru, PinnedValuesStay) {
  Item* a = insert("a", 60);
  cache.pin(a);
  insert("b", 30);
  insert("c", 60);
  EXPECT_EQ(find("a"), a);
  EXPECT_EQ(evicted, (Evicted{{"b", 30}}));
  EXPECT_EQ(cache.bytes(), 120u);
}

TEST_F(Lru, PinsAreCountedAndUnpinningEvictsNothingByItself) {
  Item* a = insert("a", 60);
  cache.pin(a);
  cache.pin(a);
  insert("b", 60);
  cache.unpin(a);
  EXPECT_TRUE(cache.pinned(a));
  insert("c", 30);
  EXPECT_EQ(names(), "ca");
  insert("d", 70);
  EXPECT_EQ(names(), "da");
  cache.unpin(a);
  EXPECT_FALSE(cache.pinned(a));
  EXPECT_EQ(find("a"), a);
  find("d");
  insert("e", 1);
  EXPECT_EQ(names(), "ed");
}

TEST_F(Lru, UnpinningTooOftenIsAnError) {
  Item* a = insert("a", 60);
  EXPECT_THROW(cache.unpin(a), base::Error);
  cache.pin(a);
  cache.unpin(a);
  EXPECT_THROW(cache.unpin(a), base::Error);
}

TEST_F(Lru, PointersThatAreNotHereAreErrors) {
  const Item stranger("x");
  EXPECT_THROW(cache.pin(&stranger), base::Error);
  EXPECT_THROW(cache.erase(&stranger), base::Error);
  EXPECT_THROW(cache.set_bytes(&stranger, 1), base::Error);
  EXPECT_THROW(cache.insert({1, 1}, nullptr, 1), base::Error);
  EXPECT_EQ(cache.size(), 0u);
}

TEST_F(Lru, AValueThatGrowsEvictsOthersButNotItself) {
  Item* a = insert("a", 40);
  insert("b", 40);
  cache.set_bytes(a, 80);
  EXPECT_EQ(names(), "a");
  EXPECT_EQ(cache.bytes(), 80u);
  cache.set_bytes(a, 10);
  EXPECT_EQ(cache.bytes(), 10u);
}

TEST_F(Lru, AllAreMeasuredBeforeAnyIsEvicted) {
  for (const char* name : {"a", "b", "c"}) insert(name, 30);
  // What "a" and "b" have given up is enough for "c".
  cache.measure([](const Item& item) { return item.name == "c" ? 90U : 5U; });
  EXPECT_EQ(names(), "cba");
  EXPECT_EQ(cache.bytes(), 100u);
  cache.measure([](const Item&) { return 60U; });
  EXPECT_EQ(names(), "c");
  // The last one stays even if it alone is above the limit.
  cache.measure([](const Item&) { return 600U; });
  EXPECT_EQ(names(), "c");
  cache.clear();
  cache.measure([](const Item&) { return 1U; });
  EXPECT_EQ(cache.bytes(), 0u);
}

TEST_F(Lru, ALowerLimitEvictsAtOnce) {
  for (const char* name : {"a", "b", "c", "d"}) insert(name, 25);
  cache.set_max_bytes(50);
  EXPECT_EQ(names(), "dc");
  cache.set_max_bytes(0);
  EXPECT_EQ(names(), "");
  EXPECT_EQ(cache.bytes(), 0u);
}

TEST_F(Lru, EraseAndClearDoNotCountAsEviction) {
  Item* a = insert("a", 10);
  Item* b = insert("b", 10);
  insert("c", 10);
  cache.erase(a);
  EXPECT_EQ(cache.bytes(), 20u);
  cache.pin(b);
  EXPECT_THROW(cache.erase(b), base::Error);
  cache.clear();
  EXPECT_EQ(names(), "b");
  EXPECT_EQ(cache.bytes(), 10u);
  EXPECT_EQ(evicted, Evicted());
  EXPECT_EQ(Item::alive, 1);
}

TEST_F(Lru, TheCallbackSeesTheValueAliveAndOutOfTheCache) {
  size_t size_in_callback = 99;
  int alive_in_callback = 0;
  LruCache<Item> other(10, [&](Item& item, uint64_t) {
    EXPECT_EQ(item.name, "a");
    size_in_callback = other.size();
    alive_in_callback = Item::alive;
  });
  other.insert({1, 1}, std::make_unique<Item>("a"), 8);
  other.insert({2, 2}, std::make_unique<Item>("b"), 8);
  EXPECT_EQ(size_in_callback, 1u);
  EXPECT_EQ(alive_in_callback, 2);
  EXPECT_EQ(Item::alive, 1);
}

TEST_F(Lru, AThrowingCallbackLeavesTheCacheWhole) {
  LruCache<Item> other(10, [](Item&, uint64_t) { throw base::Error("no"); });
  other.insert({1, 1}, std::make_unique<Item>("a"), 8);
  EXPECT_THROW(other.insert({2, 2}, std::make_unique<Item>("b"), 8), base::Error);
  EXPECT_EQ(other.size(), 1u);
  EXPECT_EQ(other.bytes(), 8u);
  EXPECT_NE(other.find({2, 2}, [](const Item& item) { return item.name == "b"; }), nullptr);
}

TEST_F(Lru, WorksWithoutACallback) {
  LruCache<Item> other(10);
  other.insert({1, 1}, std::make_unique<Item>("a"), 8);
  other.insert({2, 2}, std::make_unique<Item>("b"), 8);
  EXPECT_EQ(other.size(), 1u);
}

TEST_F(Lru, DestroysEverythingWithItself) {
  {
    LruCache<Item> other(100);
    other.pin(other.insert({1, 1}, std::make_unique<Item>("a"), 8));
    other.insert({2, 2}, std::make_unique<Item>("b"), 8);
    EXPECT_EQ(Item::alive, 2);
  }
  EXPECT_EQ(Item::alive, 0);
}

// Against a plain list, with few hashes so that most of them are shared.
TEST_F(Lru, BehavesLikeASimpleModelUnderRandomUse) {
  struct Model {
    std::string name;
    uint64_t bytes;
    int pins;
  };
  std::mt19937 random(7);
  std::list<Model> model;
  const auto hash = [](const std::string& name) { return Hash128{std::stoull(name) % 5, 1}; };
  const auto trim = [&](const std::string& keep) {
    uint64_t bytes = 0;
    for (const Model& each : model) bytes += each.bytes;
    for (auto each = model.end(); bytes > 100 && each != model.begin();) {
      --each;
      if (each->pins > 0 || each->name == keep) continue;
      bytes -= each->bytes;
      each = model.erase(each);
    }
  };
  for (int i = 0; i < 20'000; ++i) {
    const std::string name = std::to_string(random() % 30);
    const auto known = std::find_if(model.begin(), model.end(),
                                    [&](const Model& each) { return each.name == name; });
    Item* const item = find(name, hash(name));
    ASSERT_EQ(item != nullptr, known != model.end()) << "step " << i;
    const uint64_t bytes = random() % 40;
    if (item == nullptr) {
      insert(name, bytes, hash(name));
      model.push_front({name, bytes, 0});
      trim(name);
    } else {
      model.splice(model.begin(), model, known);
      switch (random() % 5) {
        case 0:
          cache.pin(item);
          ++known->pins;
          break;
        case 1:
        case 2:
          if (known->pins > 0) {
            cache.unpin(item);
            --known->pins;
          }
          break;
        case 3:
          if (known->pins == 0) {
            cache.erase(item);
            model.erase(known);
          }
          break;
        default:
          cache.set_bytes(item, bytes);
          known->bytes = bytes;
          trim(name);
      }
    }
    std::string expected;
    for (const Model& each : model) expected += each.name;
    ASSERT_EQ(names(), expected) << "step " << i;
  }
  EXPECT_GT(evicted.size(), 100u);
}

}  // namespace
}  // namespace acc::plan
