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

// `opened`, with the prefixes of `store`.
StorePtr with_prefixes(const StorePtr& store, const StorePtr& opened) {
  auto* const part = as_part(store);
  if (part == nullptr) return opened;
  return c10::make_intrusive<c10d::PrefixStore>(Prefixed::of(*part),
                                                with_prefixes(part->getUnderlyingStore(), opened));
}

}  // namespace

std::shared_ptr<const Connection> connection_to(const StorePtr& store) {
  auto* const part = as_part(store);
  const StorePtr program = part == nullptr ? store : part->getUnderlyingNonPrefixStore();
  static auto& mutex = *new std::mutex;
  // Not c10's weak pointers: a connection is not closed as long as such a one is held.
  static auto& known = *new std::vector<std::weak_ptr<const Connection>>;
  const auto find = [&]() -> std::shared_ptr<const Connection> {
    std::erase_if(known, [](const auto& each) { return each.expired(); });
    for (const auto& each : known) {
      auto found = each.lock();
      if (found != nullptr && found->program == program) return found;
    }
    return nullptr;
  };
  {
    const std::lock_guard lock(mutex);
    if (auto found = find()) return found;
  }
  // Without the mutex: a store of Python's asks for the interpreter's lock.
  auto made = std::make_shared<const Connection>(Connection{program, program->clone()});
  const std::lock_guard lock(mutex);
  if (auto found = find()) return found;
  known.push_back(made);
  return made;
}

StorePtr beside(const StorePtr& store, const Connection& connection, const char* prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, with_prefixes(store, connection.opened));
}

}  // namespace acc::distributed
