#include "distributed/watch.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "csrc/base/env.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/transfers.h"
#include "distributed/groups.h"
#include "distributed/ledger.h"
#include "lazy/session/session.h"

namespace acc::distributed {
namespace {

// Longer than a program in the middle of a step takes between two operators; a step that is cut in
// two makes plans that do not come again.
constexpr auto kWhile = std::chrono::milliseconds(100);

// Longer than a step takes to record: who records one operator after the other, and submits none of
// them, keeps others waiting as well.
constexpr auto kLong = std::chrono::seconds(2);

// Per device, how much was pending the last time.
using Pending = std::array<size_t, base::env::kMaxHostDevices>;

// For what this rank recorded so long ago. A rank that goes on by itself would wait for programs
// that are elsewhere, perhaps for this one.
bool somebody_waits(std::chrono::milliseconds since) {
  return std::ranges::any_of(all_ledgers(), [&](const auto& ledger) {
    return ledger->pending_for(since) && ledger->everybody_has_come();
  });
}

void submit_idle(Pending& before) {
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    size_t& last = before[static_cast<size_t>(i)];
    const size_t now = session::others_wait_for(device);
    const bool idle = now == std::exchange(last, now);
    if (now == 0) continue;
    try {
      if (!somebody_waits(idle ? std::chrono::milliseconds(0) : kLong)) continue;
      session::flush(device, record::FlushReason::kIdle, &all_have_come);
    } catch (...) {
      // What failed has no valid contents, and says so to who uses it.
    }
  }
}

// Of a step that has failed. Each group hears of it, also where another's store is lost.
void tell_groups(const std::string& why, const std::vector<runtime::Undone>& undone) {
  for (const runtime::Undone& of : undone) {
    try {
      Ledger& ledger = *group_of(of.group).ledger;
      ledger.skip(of.exchanges, why);
      if (of.broken) ledger.tell(why);
    } catch (const std::exception&) {
      // the thread beside it tells of the store
    }
  }
}

void submit() {
  Pending before{};
  for (;;) {
    std::this_thread::sleep_for(kWhile);
    submit_idle(before);
  }
}

}  // namespace

void watch_groups() {
  static std::once_flag once;
  std::call_once(once, [] {
    runtime::install_failure_listener(&tell_groups);
    std::thread(submit).detach();
  });
}

}  // namespace acc::distributed
