#include "distributed/transfer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "distributed/behind.h"
#include "distributed/ledger.h"

namespace acc::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using base::count;
using base::Counter;

// How often a thread that waits looks whether the user has asked to stop.
constexpr auto kLookAtStop = std::chrono::milliseconds(50);

uint64_t microseconds(Clock::duration time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

// Other processes may still write to the transfer's memory.
[[noreturn]] void give_up(const std::string& why) {
  runtime::leave_transfers();
  C10_THROW_ERROR(DistBackendError, "[torch.distributed] " + why);
}

// Which works are over. Who tells it so keeps it, so it may outlive the transfer.
class Progress {
 public:
  explicit Progress(size_t works) : left_(works) {}

  void one_is_over(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
    if (--left_ > 0) return;
    end_ = Clock::now();
    over_.notify_all();
  }

  // Returns when all of them were over. Throws what failed, and before that where the user asks to
  // stop or other ranks have failed.
  Clock::time_point wait(Ledger& ledger, uint64_t sequence) {
    const Clock::time_point begin = Clock::now();
    bool told = false;
    std::unique_lock lock(mutex_);
    while (!over_.wait_for(lock, kLookAtStop, [this] { return left_ == 0; })) {
      lock.unlock();
      if (!told && waits_too_long(begin)) {
        told = true;
        tell_of_wait(ledger.text_of(sequence));
      }
      if (runtime::interrupted()) give_up("interrupted while waiting for other processes.");
      if (const std::string why = ledger.failure(); !why.empty()) give_up(why);
      lock.lock();
    }
    lock.unlock();
    if (error_ == nullptr) return end_;
    const std::string text = runtime::text_of(error_);
    C10_THROW_ERROR(DistBackendError, text + ledger.explain(sequence, text));
  }

  bool over() {
    const std::lock_guard lock(mutex_);
    return left_ == 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  size_t left_;
  std::exception_ptr error_;
  Clock::time_point end_;
};

// Null for works that have none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// For works that go on only while somebody waits for them: sends and receives. Gloo's own limit for
// these stays what it was when the group was made.
void wait_for(c10d::Work& work, std::chrono::milliseconds timeout, Progress& progress) {
  // Some copy their results then, to tensors that may have been made in inference mode.
  const at::AutoDispatchBelowADInplaceOrView below;
  try {
    work.wait(timeout);
    progress.one_is_over(nullptr);
  } catch (...) {
    progress.one_is_over(std::current_exception());
  }
}

class HostTransfer final : public runtime::Transfer {
 public:
  HostTransfer(const Works& works, std::shared_ptr<Ledger> ledger, uint64_t sequence)
      : ledger_(std::move(ledger)),
        sequence_(sequence),
        progress_(std::make_shared<Progress>(works.size())) {
    for (const auto& work : works) watch(work);
  }

  void wait() override {
    const Clock::time_point before = Clock::now();
    for (const auto& work : take_unwatched()) wait_for(*work, timeout_, *progress_);
    const Clock::time_point end = progress_->wait(*ledger_, sequence_);
    count(Counter::TransferUs, microseconds(end - begin_));
    count(Counter::TransferWaitUs, microseconds(Clock::now() - before));
  }
  bool over() override {
    for (const auto& work : take_unwatched()) watch(work);
    return progress_->over();
  }

 private:
  void watch(const c10::intrusive_ptr<c10d::Work>& work) {
    if (const auto future = future_of(*work)) {
      future->addCallback([progress = progress_](c10::ivalue::Future& done) {
        progress->one_is_over(done.hasError() ? done.exception_ptr() : nullptr);
      });
      return;
    }
    try {
      std::thread([work, timeout = timeout_, progress = progress_] {
        wait_for(*work, timeout, *progress);
      }).detach();
    } catch (const std::system_error&) {  // no thread is left
      const std::lock_guard lock(mutex_);
      unwatched_.push_back(work);
    }
  }
  Works take_unwatched() {
    const std::lock_guard lock(mutex_);
    return std::exchange(unwatched_, {});
  }

  const std::shared_ptr<Ledger> ledger_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_ = ledger_->timeout();
  const std::shared_ptr<Progress> progress_;
  const Clock::time_point begin_ = Clock::now();
  std::mutex mutex_;
  // Those that no thread waits for. `wait` does, and then hears of nothing else; not the
  // constructor: the program may have to send something first.
  Works unwatched_;
};

class StreamTransfer final : public runtime::Transfer {
 public:
  StreamTransfer(Works works, std::shared_ptr<Ledger> ledger)
      : works_(std::move(works)), ledger_(std::move(ledger)) {}
  void wait() override {
    if (const std::string why = ledger_->failure(); !why.empty()) give_up(why);
    for (const auto& work : works_) work->wait();
  }
  bool over() override { return true; }  // for what comes behind it in the stream

 private:
  const Works works_;
  const std::shared_ptr<Ledger> ledger_;
};

}  // namespace

std::unique_ptr<runtime::Transfer> transfer_of(Works works, bool on_host,
                                               std::shared_ptr<Ledger> ledger, uint64_t sequence) {
  count(Counter::Transfers);
  if (works.empty()) return nullptr;
  if (!on_host) return std::make_unique<StreamTransfer>(std::move(works), std::move(ledger));
  return std::make_unique<HostTransfer>(works, std::move(ledger), sequence);
}

}  // namespace acc::distributed
