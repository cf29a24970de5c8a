#include "distributed/groups.h"

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "csrc/base/check.h"
#include "distributed/ledger.h"

namespace acc::distributed {
namespace {

struct Groups {
  std::mutex mutex;
  std::map<int64_t, Group> all;
  int64_t next = 0;
};

// Never destroyed: plans may run while the process ends.
Groups& groups() {
  static auto* const made = new Groups;
  return *made;
}

}  // namespace

int64_t add_group(Group group) {
  group.ledger->start();
  Groups& known = groups();
  const std::lock_guard lock(known.mutex);
  known.all.emplace(known.next, std::move(group));
  return known.next++;
}

void remove_group(int64_t number) {
  Group last;  // dies without the lock
  Groups& known = groups();
  const std::lock_guard lock(known.mutex);
  if (auto node = known.all.extract(number)) last = std::move(node.mapped());
}

Group group_of(int64_t number) {
  Groups& known = groups();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(number);
  ACC_CHECK(found != known.all.end(), "[torch.distributed] the process group of this ",
            "operation was destroyed. Call destroy_process_group() after the last step.");
  return found->second;
}

bool all_have_come(int64_t number) { return group_of(number).ledger->everybody_has_come(); }

std::vector<std::shared_ptr<Ledger>> all_ledgers() {
  std::vector<std::shared_ptr<Ledger>> ledgers;
  Groups& known = groups();
  const std::lock_guard lock(known.mutex);
  ledgers.reserve(known.all.size());
  for (const auto& [number, group] : known.all) ledgers.push_back(group.ledger);
  return ledgers;
}

std::vector<Group> all_groups() {
  std::vector<Group> all;
  Groups& known = groups();
  const std::lock_guard lock(known.mutex);
  all.reserve(known.all.size());
  for (const auto& [number, group] : known.all) all.push_back(group);
  return all;
}

}  // namespace acc::distributed
