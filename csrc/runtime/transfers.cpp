#include "csrc/runtime/transfers.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <iterator>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"

namespace acc::runtime {
namespace {

using TransferList = std::vector<std::pair<int64_t, std::unique_ptr<Transfer>>>;

struct UnderWay {
  TransferList transfers;  // in the order in which they began
  size_t before = 0;       // how many of them had begun before the piece of captured work
};

// Each is guarded by the mutex of its device.
UnderWay& transfers_of(c10::DeviceIndex device) {
  static auto& all = *new std::array<UnderWay, base::env::kMaxHostDevices>;
  return all.at(static_cast<size_t>(device));
}

thread_local UnderWay* under_way = nullptr;
thread_local bool left = false;
std::atomic<FailureListener> listener = nullptr;

// Those from `first` on, which are under way no more.
TransferList take_transfers(size_t first) {
  TransferList& all = under_way->transfers;
  const auto begin = all.begin() + static_cast<ptrdiff_t>(std::min(first, all.size()));
  TransferList taken(std::make_move_iterator(begin), std::make_move_iterator(all.end()));
  all.erase(begin, all.end());
  under_way->before = std::min(under_way->before, first);
  return taken;
}

size_t join_from(size_t first) {
  ACC_CHECK(under_way != nullptr);
  const TransferList all = take_transfers(first);
  std::exception_ptr error;
  for (const auto& [ticket, transfer] : all) {
    try {
      if (transfer != nullptr) transfer->wait();
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
  return all.size();
}

}  // namespace

TransfersOf::TransfersOf(c10::DeviceIndex device) : before_(under_way) {
  under_way = &transfers_of(device);
}
TransfersOf::~TransfersOf() { under_way = static_cast<UnderWay*>(before_); }

void begin_transfer(int64_t ticket, std::unique_ptr<Transfer> transfer) {
  ACC_CHECK(under_way != nullptr);
  under_way->transfers.emplace_back(ticket, std::move(transfer));
}

void end_transfer(int64_t ticket) {
  ACC_CHECK(under_way != nullptr);
  TransferList& all = under_way->transfers;
  const auto found = std::ranges::find(all, ticket, &TransferList::value_type::first);
  if (found == all.end()) return;
  const std::unique_ptr<Transfer> transfer = std::move(found->second);
  if (static_cast<size_t>(found - all.begin()) < under_way->before) --under_way->before;
  all.erase(found);
  if (transfer != nullptr) transfer->wait();
}

void join_transfers() { join_from(0); }

bool transfers_under_way() { return under_way != nullptr && !under_way->transfers.empty(); }

void fork_transfers() { under_way->before = under_way->transfers.size(); }

size_t join_forked_transfers() { return join_from(under_way->before); }

void forget_forked_transfers() noexcept { under_way->transfers.resize(under_way->before); }

void leave_transfers() noexcept { left = true; }

bool end_all_transfers() noexcept {
  bool over = !std::exchange(left, false);
  for (const auto& [ticket, transfer] : take_transfers(0)) {
    try {
      if (transfer == nullptr) continue;
      if (transfer->over()) {
        transfer->wait();
      } else {
        over = false;
      }
    } catch (...) {
      // The plan's own failure is what the user hears of.
    }
  }
  return over;
}

void install_failure_listener(FailureListener installed) { listener = installed; }

void tell_failure(const std::string& why, const std::vector<Undone>& undone) noexcept {
  const auto call = listener.load();
  if (call == nullptr || undone.empty()) return;
  try {
    call(why, undone);
  } catch (...) {
    // nobody can be told
  }
}

}  // namespace acc::runtime
