#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace acc::distributed {

// What a rank sends to itself, as two stages of a pipeline on one rank do. NCCL carries that, Gloo
// does not.
class Loopback {
 public:
  void send(int tag, at::Tensor contents);
  // Whether something was sent with that tag that nobody receives so far.
  bool has(int tag);
  // The number of the next that is received with that tag.
  uint64_t receive(int tag);
  // Undefined where it was not sent so far.
  at::Tensor take(int tag, uint64_t number);

 private:
  using Number = std::pair<int, uint64_t>;  // tag, and how many with it were before
  std::mutex mutex_;
  std::map<int, uint64_t> sent_;
  std::map<int, uint64_t> received_;
  std::map<Number, at::Tensor> under_way_;
};

// One of these receives. It is over when it was sent: nobody else could do that, so `wait` throws
// where that was not before.
class LoopbackWork final : public c10d::Work {
 public:
  LoopbackWork(std::shared_ptr<Loopback> loopback, int rank, int tag, at::Tensor to);

  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  int sourceRank() const override { return rank_; }
  std::vector<at::Tensor> result() override { return {result_}; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  bool arrived();

  const std::shared_ptr<Loopback> loopback_;
  const int tag_;
  const uint64_t number_;
  const at::Tensor result_;
  at::Tensor to_;        // undefined: it has its contents
  at::Tensor contents_;  // of what arrived
};

}  // namespace acc::distributed
