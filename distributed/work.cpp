#include "distributed/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"
#include "csrc/runtime/on_device.h"
#include "distributed/groups.h"
#include "distributed/ledger.h"
#include "lazy/session/session.h"
#include "lazy/session/strict.h"

namespace acc::distributed {

namespace {

using Clock = std::chrono::steady_clock;
using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// When a thread that waits for no longer than it was told looks again: later each time, since that
// may ask the group's store for each rank.
constexpr std::chrono::nanoseconds kFirstPause = std::chrono::milliseconds(5);
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(100);

// Returns when `over` is true. Throws where that takes longer, which ends nothing; looks at the
// clock between two calls of `over`.
template <class Over>
void wait_until(Over over, std::chrono::milliseconds timeout, c10d::OpType type) {
  const runtime::GilRelease release;
  const auto limit = Clock::now() + timeout;
  for (auto pause = kFirstPause; !over(); pause = std::min(2 * pause, kLongestPause)) {
    TORCH_CHECK_WITH(DistBackendError, !runtime::interrupted(),
                     "[torch.distributed] interrupted while waiting for other processes.");
    const std::chrono::nanoseconds left = limit - Clock::now();
    TORCH_CHECK_WITH(DistBackendError, left.count() > 0, "[torch.distributed] ",
                     c10d::opTypeToString(type), " is not over after the ", timeout.count(),
                     " ms that wait() was given. It goes on.");
    std::this_thread::sleep_for(std::min(pause, left));
  }
}

Future new_future(const std::vector<at::Tensor>& result) {
  std::vector<c10::Device> devices;
  if (!result.empty()) devices.push_back(result[0].device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

// Completed by a thread that waits: two ranks may ask for those of their receives before they send.
Future waited_future(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> result) {
  Future future = new_future(result);
  std::thread([work = std::move(work), result = std::move(result), future] {
    try {
      work->wait();
      future->markCompleted(c10::IValue(result));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }).detach();
  return future;
}

// How what `future` stands for ends, as a WorkResult.
Future outcome_of(c10::ivalue::Future& future) {
  return future.then(
      [](c10::ivalue::Future& done) {
        using c10d::WorkResult;
        const auto how = done.hasError() ? WorkResult::COMM_ERROR : WorkResult::SUCCESS;
        return c10::IValue(static_cast<int64_t>(how));
      },
      c10::IntType::get());
}

}  // namespace

RecordedWork::RecordedWork(c10d::OpType type, std::vector<at::Tensor> result,
                           c10::DeviceIndex device, uint64_t sequence,
                           std::shared_ptr<Ledger> ledger)
    : Work(-1, type),
      result_(std::move(result)),
      device_(device),
      sequence_(sequence),
      ledger_(std::move(ledger)) {}

std::exception_ptr RecordedWork::error() const {
  const std::lock_guard lock(known_);
  return error_;
}

bool RecordedWork::isCompleted() {
  if (device_ < 0 || opType_ == c10d::OpType::SEND || error() != nullptr) return true;
  const runtime::GilRelease release;
  // Strict mode's refusal is no failure of the collective, which has not been submitted.
  session::refuse_cut(device_, record::FlushReason::kEvent);
  try {
    // On a GPU what is submitted waits for other devices, and this process goes on.
    const bool waits = ledger_ != nullptr && ledger_->counts() && runtime::on_host();
    if (!waits || !ledger_->has_begun(sequence_)) {
      if (!waits) {
        runtime::flush(device_, runtime::Cause::kEvent);
      } else {
        if (!ledger_->everybody_has_come()) return false;
        session::flush(device_, record::FlushReason::kEvent, &all_have_come);
        if (!ledger_->has_begun(sequence_)) return false;
      }
    } else if (session::runs(device_)) {
      return false;
    }
  } catch (...) {
    const std::lock_guard lock(known_);
    if (error_ == nullptr) error_ = std::current_exception();
    return true;
  }
  return runtime::await_device(device_, [&] {
    runtime::Backend& backend = runtime::backend();
    return backend.query_stream(backend.default_stream(device_));
  });
}

// Who runs what was submitted has the recording until that is over.
std::exception_ptr RecordedWork::exception() const {
  return device_ >= 0 && session::runs(device_) ? error() : failure();
}

std::exception_ptr RecordedWork::failure() const {
  // Sends, which have no device, read a copy.
  if (auto known = error(); known != nullptr || device_ < 0) return known;
  const runtime::GilRelease release;
  std::string why = result_.empty() && ledger_ != nullptr ? ledger_->failure() : "";
  for (const at::Tensor& tensor : result_) {
    if (const auto poison = session::poison_of(tensor); poison != nullptr) why = poison->message;
  }
  if (why.empty()) return nullptr;
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  return std::make_exception_ptr(c10::DistBackendError(here, "[torch.distributed] " + why));
}

bool RecordedWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {  // what comes later comes behind it
    if (const auto known = error(); known != nullptr) std::rethrow_exception(known);
    return true;
  }
  wait_until([this] { return isCompleted(); }, timeout, opType_);
  if (const auto error = failure(); error != nullptr) std::rethrow_exception(error);
  return true;
}

bool SentWork::isCompleted() {
  sends_->note_awaited(number_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SentWork::getFuture() {
  sends_->note_awaited(number_);
  return RecordedWork::getFuture();
}

c10::intrusive_ptr<c10::ivalue::Future> SentWork::getFutureResult() {
  sends_->note_awaited(number_);
  return RecordedWork::getFutureResult();
}

bool SentWork::wait(std::chrono::milliseconds timeout) {
  sends_->make_room(number_, timeout);
  return true;
}

// Complete at once: who uses the tensors comes behind in the order of the step.
c10::intrusive_ptr<c10::ivalue::Future> RecordedWork::getFuture() {
  {
    const std::lock_guard lock(known_);
    if (future_ != nullptr) return future_;
  }
  const Future made = new_future(result_);
  made->markCompleted(c10::IValue(result_));
  const std::lock_guard lock(known_);
  if (future_ == nullptr) future_ = made;
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> RecordedWork::getFutureResult() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  future->markCompleted(c10::IValue(static_cast<int64_t>(c10d::WorkResult::SUCCESS)));
  return future;
}

BegunWork::BegunWork(c10d::OpType type, Works works, std::vector<at::Tensor> result,
                     std::shared_ptr<Ledger> ledger, uint64_t sequence)
    : Work(-1, type),
      works_(works),
      result_(std::move(result)),
      transfer_(transfer_of(std::move(works), runtime::on_host(), std::move(ledger), sequence)),
      device_(result_.empty() ? runtime::backend().current_device() : result_[0].device().index()) {
}

bool BegunWork::isCompleted() {
  if (!runtime::on_host()) {
    const auto is_over = [](const auto& work) { return work->isCompleted(); };
    if (!std::ranges::all_of(works_, is_over)) return false;
  } else if (transfer_ != nullptr && !transfer_->over()) {
    return false;
  }
  try {
    wait(kNoTimeout);
  } catch (...) {
    // it is kept
  }
  return true;
}

std::exception_ptr BegunWork::exception() const {
  const std::lock_guard lock(known_);
  return error_;
}

int BegunWork::sourceRank() const {
  return works_.size() == 1 ? works_[0]->sourceRank() : Work::sourceRank();
}

// Without a timeout of its own the limit is the group's, as for everything that its transport
// carries.
bool BegunWork::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout) {
    if (!runtime::on_host()) {
      for (const auto& work : works_) work->wait(timeout);
    } else if (transfer_ != nullptr) {
      wait_until([this] { return transfer_->over(); }, timeout, opType_);
    }
  }
  const runtime::LockWithoutGil lock(waiting_);
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (over_) return true;
  try {
    // what comes later on the device comes behind it
    const runtime::OnDevice on_device(device_);
    if (transfer_ != nullptr) transfer_->wait();
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& [received, to] : copies_) to.copy_(received);
  } catch (...) {
    const std::lock_guard known(known_);
    error_ = std::current_exception();
    throw;
  }
  over_ = true;
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> BegunWork::getFuture() {
  const std::lock_guard lock(known_);
  if (future_ == nullptr) {
    auto self = c10::intrusive_ptr<BegunWork>::unsafe_reclaim_from_nonowning(this);
    future_ = waited_future(std::move(self), result_);
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> BegunWork::getFutureResult() {
  return outcome_of(*getFuture());
}

bool CoalescedWork::isCompleted() {
  return (group_ == nullptr || group_->isCompleted()) &&
         std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
}

std::exception_ptr CoalescedWork::exception() const {
  if (group_ != nullptr && group_->exception() != nullptr) return group_->exception();
  for (const auto& work : works_) {
    if (const auto error = work->exception(); error != nullptr) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = Clock::now() + timeout;
  const auto rest = [&] {
    if (timeout == kNoTimeout) return kNoTimeout;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  };
  if (group_ != nullptr) {
    const runtime::OnDevice on_device(result_[0].device().index());
    group_->wait(timeout);
  }
  for (const auto& work : works_) work->wait(rest());
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  const std::lock_guard lock(known_);
  if (future_ == nullptr) {
    auto self = c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this);
    future_ = waited_future(std::move(self), result_);
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFutureResult() {
  return outcome_of(*getFuture());
}

}  // namespace acc::distributed
