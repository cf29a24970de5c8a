#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "distributed/sends.h"
#include "distributed/transfer.h"

namespace acc::distributed {

// A collective that was recorded. It is over, for whoever uses its tensors, from the begin.
class RecordedWork : public c10d::Work {
 public:
  // `device`: of its tensors, also where this rank gets no result; negative: there is nothing to
  // wait for. `ledger`: where the collective of that number is counted; null: nowhere.
  RecordedWork(c10d::OpType type, std::vector<at::Tensor> result, c10::DeviceIndex device,
               uint64_t sequence, std::shared_ptr<Ledger> ledger = nullptr);

  // Submits what all ranks have come to, and asks whether it is done.
  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  // What is known without asking for more: a failure that was met since, or why the result has no
  // valid contents, which is not known while the device runs what was submitted.
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return result_; }
  void synchronize() override {}
  void blockCurrentStream() override {}
  // Stops the process only with a timeout of its own, until it is over. Looks at the clock between
  // submissions: one that has begun ends with its collectives, at the group's timeout at the
  // latest.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  std::exception_ptr error() const;
  std::exception_ptr failure() const;

  const std::vector<at::Tensor> result_;
  const c10::DeviceIndex device_;
  const uint64_t sequence_;
  const std::shared_ptr<Ledger> ledger_;
  mutable std::mutex known_;  // guards the rest; nobody waits, or calls others, who has it
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A send whose contents are kept (see Sends), so that it is over for the program from the begin.
// Who waits for it waits while too much is under way.
class SentWork final : public RecordedWork {
 public:
  SentWork(std::vector<at::Tensor> tensors, uint64_t sequence, std::shared_ptr<Sends> sends,
           uint64_t number)
      : RecordedWork(c10d::OpType::SEND, std::move(tensors), -1, sequence),
        sends_(std::move(sends)),
        number_(number) {}

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

 private:
  const std::shared_ptr<Sends> sends_;
  const uint64_t number_;
};

// Transfers that began when they were called. They are over, and what they brought is where it
// belongs, when `wait` returns, when `isCompleted` is true, or when the future is completed.
class BegunWork final : public c10d::Work {
 public:
  // `works`: the transport's. `received`, `to`: what was received goes on to these tensors of acc
  // when it is there; `result`: what the program gave.
  BegunWork(c10d::OpType type, Works works, std::vector<at::Tensor> result,
            std::shared_ptr<Ledger> ledger, uint64_t sequence);
  void then_copy(at::Tensor received, at::Tensor to) { copies_.emplace_back(received, to); }

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return result_; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

 private:
  const Works works_;
  const std::vector<at::Tensor> result_;
  const std::unique_ptr<runtime::Transfer> transfer_;
  const c10::DeviceIndex device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::mutex waiting_;  // one thread at a time does
  bool over_ = false;
  mutable std::mutex known_;  // nobody waits who has it
  std::exception_ptr error_;  // written with both, read with either
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several of these at once.
class CoalescedWork final : public c10d::Work {
 public:
  // `group`: the transport's work for all of them; null: each has its own.
  CoalescedWork(Works works, c10::intrusive_ptr<c10d::Work> group, std::vector<at::Tensor> result)
      : Work(-1, c10d::OpType::COALESCED),
        works_(std::move(works)),
        group_(std::move(group)),
        result_(std::move(result)) {}

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

 private:
  const Works works_;
  const c10::intrusive_ptr<c10d::Work> group_;
  const std::vector<at::Tensor> result_;
  std::mutex known_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace acc::distributed
