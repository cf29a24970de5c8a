#include "distributed/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"
#include "csrc/runtime/on_device.h"
#include "distributed/groups.h"
#include "distributed/ledger.h"
#include "lazy/session/session.h"
#include "lazy/session/strict.h"

namespace acc::distributed {

RecordedWork::RecordedWork(c10d::OpType type, std::vector<at::Tensor> result, uint64_t sequence,
                           std::shared_ptr<Ledger> ledger)
    : Work(-1, type), result_(std::move(result)), sequence_(sequence), ledger_(std::move(ledger)) {}

bool RecordedWork::isCompleted() {
  if (result_.empty() || opType_ == c10d::OpType::SEND) return true;
  const runtime::GilRelease release;
  const c10::DeviceIndex device = result_[0].device().index();
  // Strict mode's refusal is no failure of the collective, which has not been submitted.
  session::refuse_cut(device, record::FlushReason::kEvent);
  try {
    // On a GPU what is submitted waits for other devices, and this process goes on.
    const bool waits = ledger_ != nullptr && ledger_->counts() && runtime::on_host();
    if (!waits || !ledger_->has_begun(sequence_)) {
      if (!waits) {
        runtime::flush(device, runtime::Cause::kEvent);
      } else {
        if (!ledger_->everybody_has_come()) return false;
        session::flush(device, record::FlushReason::kEvent, &all_have_come);
        if (!ledger_->has_begun(sequence_)) return false;
      }
    } else if (session::runs(device)) {
      return false;
    }
  } catch (...) {
    error_ = std::current_exception();
    return true;
  }
  runtime::Backend& backend = runtime::backend();
  return backend.query_stream(backend.default_stream(device));
}

bool RecordedWork::isSuccess() const { return error_ == nullptr; }

std::exception_ptr RecordedWork::exception() const { return error_; }

// Complete at once: who uses the tensors comes behind in the order of the step.
c10::intrusive_ptr<c10::ivalue::Future> RecordedWork::getFuture() {
  if (future_ == nullptr) {
    std::vector<c10::Device> devices;
    if (!result_.empty()) devices.push_back(result_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    future_->markCompleted(c10::IValue(result_));
  }
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
  if (transfer_ != nullptr && !transfer_->over()) return false;
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

// The limit is the group's timeout, as for everything that its transport carries.
bool BegunWork::wait(std::chrono::milliseconds) {
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

// Completed by a thread that waits: two ranks may ask for those of their receives before they send.
c10::intrusive_ptr<c10::ivalue::Future> BegunWork::getFuture() {
  const std::lock_guard lock(known_);
  if (future_ != nullptr) return future_;
  std::vector<c10::Device> devices;
  if (!result_.empty()) devices.push_back(result_[0].device());
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::move(devices));
  std::thread([self = c10::intrusive_ptr<BegunWork>::unsafe_reclaim_from_nonowning(this),
               future = future_] {
    try {
      self->wait(kNoTimeout);
      future->markCompleted(c10::IValue(self->result_));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }).detach();
  return future_;
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
  if (group_ != nullptr) {
    const runtime::OnDevice on_device(result_[0].device().index());
    group_->wait();
  }
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

}  // namespace acc::distributed
