#include "distributed/stores.h"

#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace acc::distributed {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// PrefixStore tells what it is a part of, and its own prefix to classes made from it.
struct Prefixed : c10d::PrefixStore {
  static const std::string& of(const c10d::PrefixStore& store) { return store.*&Prefixed::prefix_; }
};

c10d::PrefixStore* as_part(const StorePtr& store) {
  return dynamic_cast<c10d::PrefixStore*>(store.get());
}

// A program's store, and what was opened beside it.
struct Connection {
  StorePtr store, opened;
};

// Not c10's weak pointers: a connection is not closed as long as such a one is held.
std::shared_ptr<Connection> connection_to(const StorePtr& store) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::vector<std::weak_ptr<Connection>>;
  const auto find = [&]() -> std::shared_ptr<Connection> {
    std::erase_if(known, [](const auto& each) { return each.expired(); });
    for (const auto& each : known) {
      if (auto found = each.lock(); found != nullptr && found->store == store) return found;
    }
    return nullptr;
  };
  {
    const std::lock_guard lock(mutex);
    if (auto found = find()) return found;
  }
  // Without the mutex: a store of Python's asks for the interpreter's lock.
  auto made = std::make_shared<Connection>(Connection{store, store->clone()});
  const std::lock_guard lock(mutex);
  if (auto found = find()) return found;
  known.push_back(made);
  return made;
}

// `opened`, with the prefixes of `store`.
StorePtr with_prefixes(const StorePtr& store, const StorePtr& opened) {
  auto* const part = as_part(store);
  if (part == nullptr) return opened;
  return c10::make_intrusive<c10d::PrefixStore>(Prefixed::of(*part),
                                                with_prefixes(part->getUnderlyingStore(), opened));
}

}  // namespace

std::shared_ptr<c10d::Store> beside(const StorePtr& store, const char* prefix) {
  auto* const part = as_part(store);
  auto connection = connection_to(part == nullptr ? store : part->getUnderlyingNonPrefixStore());
  auto made =
      c10::make_intrusive<c10d::PrefixStore>(prefix, with_prefixes(store, connection->opened));
  c10d::Store* const pointer = made.get();
  auto kept = std::make_shared<std::pair<std::shared_ptr<Connection>, StorePtr>>(
      std::move(connection), std::move(made));
  return {std::move(kept), pointer};
}

}  // namespace acc::distributed
