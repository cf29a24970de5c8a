#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace c10d {
class Backend;
}

// The groups of this process, by numbers that recorded operators can hold.
namespace acc::distributed {

class Ledger;
class Sends;

struct Group {
  c10::intrusive_ptr<c10d::Backend> transport;  // Gloo on hosts, NCCL on GPUs
  std::shared_ptr<Ledger> ledger;
  std::shared_ptr<Sends> sends;
};

int64_t add_group(Group group);
// Plans that were recorded with it fail from now on.
void remove_group(int64_t number);
// Throws for a group that was removed.
Group group_of(int64_t number);
std::vector<Group> all_groups();
std::vector<std::shared_ptr<Ledger>> all_ledgers();
// Whether all ranks of a group have come to the exchange that this one has next in it, so that none
// waits for another's program (see Ledger::everybody_has_come).
bool all_have_come(int64_t number);

}  // namespace acc::distributed
