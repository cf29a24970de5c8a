#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/runtime/transfers.h"

namespace c10d {
class Work;
}

namespace acc::distributed {

class Ledger;

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Transfers of CPU memory are over when `wait` returns; on a GPU its stream waits. How long they
// took, and how much of that the plan waited, is counted (transfer_us, transfer_wait_us). Null
// where there is nothing to wait for. `sequence`: of the collective in the ledger, for errors; 0:
// it is none.
std::unique_ptr<runtime::Transfer> transfer_of(Works works, bool on_host,
                                               std::shared_ptr<Ledger> ledger, uint64_t sequence);

}  // namespace acc::distributed
