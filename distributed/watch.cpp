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
#include "lazy/record/watch.h"
#include "lazy/session/session.h"

namespace acc::distributed {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than a program in the middle of a step takes between two operators; a step that is cut in
// two makes plans that do not come again.
constexpr auto kWhile = std::chrono::milliseconds(100);

// Longer than a step takes to record: who records one operator after the other, and submits none of
// them, keeps others waiting as well.
constexpr auto kLong = std::chrono::seconds(2);

// Who waits for one collective after the other asks this often for the next one, and then half as
// often each time: the others may need the result of one to come to the next.
constexpr auto kAgain = std::chrono::milliseconds(1);

// A call that is recorded for capture is submitted as a whole at its end, which cannot be far: only
// one that waits itself for what others do when they have the result is cut in two, behind this.
constexpr auto kRecorded = std::chrono::seconds(5);

// What a device has pending, since when its program has not added to it, and since when it might be
// submitted for that.
struct Pending {
  size_t count = 0;
  Clock::time_point added;
  Clock::time_point since;
};
using Devices = std::array<Pending, base::env::kMaxHostDevices>;

// For what this rank recorded so long ago. A rank that goes on by itself would wait for programs
// that are elsewhere, perhaps for this one.
bool somebody_waits(std::chrono::milliseconds since) {
  return std::ranges::any_of(all_ledgers(), [&](const auto& ledger) {
    return ledger->pending_for(since) && ledger->everybody_has_come();
  });
}

uint64_t begun_by_all() {
  uint64_t sum = 0;
  for (const auto& ledger : all_ledgers()) sum += ledger->begun();
  return sum;
}

// Returns whether something began.
bool submit_idle(Devices& devices) {
  bool some_began = false;
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    Pending& pending = devices[static_cast<size_t>(i)];
    const size_t count = session::others_wait_for(device);
    const Clock::time_point now = Clock::now();
    if (count != std::exchange(pending.count, count)) pending.added = pending.since = now;
    if (count == 0) continue;
    if (record::watching() && now - pending.added < kRecorded) {
      pending.since = now;
      continue;
    }
    const bool idle = now - pending.since >= kWhile;
    try {
      if (!somebody_waits(idle ? std::chrono::milliseconds(0) : kLong)) continue;
      const uint64_t begun = begun_by_all();
      session::flush(device, record::FlushReason::kIdle, &all_have_come);
      some_began |= begun_by_all() != begun;
    } catch (...) {
      // What failed has no valid contents, and says so to who uses it.
    }
    pending.count = session::others_wait_for(device);
    if (!session::is_stopped(device)) pending.added = pending.since = Clock::now();
  }
  return some_began;
}

// Of a step that has failed. Each group hears of it, also where another's store is lost.
void tell_groups(const std::string& why, const std::vector<runtime::Undone>& undone) {
  const auto tell = [](const auto& how) {
    try {
      how();
    } catch (const std::exception&) {
      // the thread beside it tells of the store
    }
  };
  for (const runtime::Undone& of : undone) {
    tell([&] { group_of(of.group).ledger->skip(of.exchanges, why); });
    if (of.broken) tell([&] { group_of(of.group).ledger->tell(why); });
  }
}

void submit() {
  Devices devices{};
  for (std::chrono::milliseconds pause = kWhile;;) {
    std::this_thread::sleep_for(pause);
    pause = submit_idle(devices) ? kAgain : std::min<std::chrono::milliseconds>(2 * pause, kWhile);
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
