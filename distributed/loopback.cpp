#include "distributed/loopback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

namespace acc::distributed {

void Loopback::send(int tag, at::Tensor contents) {
  const std::lock_guard lock(mutex_);
  under_way_.emplace(Number(tag, sent_[tag]++), std::move(contents));
}

bool Loopback::has(int tag) {
  const std::lock_guard lock(mutex_);
  return sent_[tag] > received_[tag];
}

uint64_t Loopback::receive(int tag) {
  const std::lock_guard lock(mutex_);
  return received_[tag]++;
}

at::Tensor Loopback::take(int tag, uint64_t number) {
  const std::lock_guard lock(mutex_);
  auto node = under_way_.extract(Number(tag, number));
  return node ? std::move(node.mapped()) : at::Tensor();
}

LoopbackWork::LoopbackWork(std::shared_ptr<Loopback> loopback, int rank, int tag, at::Tensor to)
    : Work(rank, c10d::OpType::RECV),
      loopback_(std::move(loopback)),
      tag_(tag),
      number_(loopback_->receive(tag)),
      result_(to),
      to_(std::move(to)) {}

bool LoopbackWork::arrived() {
  if (!contents_.defined()) contents_ = loopback_->take(tag_, number_);
  return contents_.defined();
}

bool LoopbackWork::isCompleted() {
  if (!to_.defined()) return true;
  if (!arrived()) return false;
  try {
    wait(kNoTimeout);
  } catch (const c10::Error&) {
    // who waits for it is told
  }
  return true;
}

bool LoopbackWork::wait(std::chrono::milliseconds) {
  if (!to_.defined()) return true;
  TORCH_CHECK(arrived(), "[torch.distributed] recv from rank ", rank_,
              ", which is this one, waits for something that was not sent. Call isend before, "
              "or both in batch_isend_irecv.");
  TORCH_CHECK(contents_.numel() == to_.numel() && contents_.scalar_type() == to_.scalar_type(),
              "[torch.distributed] recv of ", to_.numel(), " ", to_.scalar_type(),
              " from this rank itself got ", contents_.numel(), " ", contents_.scalar_type(), ".");
  const at::AutoDispatchBelowADInplaceOrView below;
  to_.copy_(contents_.view(to_.sizes()));
  to_.reset();
  contents_.reset();
  return true;
}

}  // namespace acc::distributed
