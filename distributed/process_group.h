#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "distributed/collectives.h"
#include "distributed/ledger.h"
#include "distributed/loopback.h"
#include "distributed/sends.h"
#include "distributed/stores.h"

// The process group "acc". Collectives on tensors of acc are operators of the step that is being
// recorded: they begin when their inputs are written and are waited for by what reads their
// results. As with NCCL, `Work::wait` orders what comes later and does not stop the process; what
// went wrong is raised where the process reads. Sends, receives and barriers are not recorded and
// begin at once: what a send reads, and what is before a barrier, is submitted first.
namespace acc::distributed {

class ProcessGroupACC final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `transport` does what is recorded, on tensors of the backend's device: ProcessGroupGloo on
  // hosts, ProcessGroupNCCL on GPUs, of the same ranks.
  // `store`: of this group alone, by which its ranks compare what they do; null: they do not.
  ProcessGroupACC(c10::intrusive_ptr<c10d::Backend> transport,
                  const c10::intrusive_ptr<c10d::Store>& store);
  ~ProcessGroupACC() override;

  const c10::intrusive_ptr<c10d::Backend>& transport() const { return transport_; }
  // As Ledger::failure says.
  std::string failure() const { return ledger_->failure(); }

  const std::string getBackendName() const override { return "acc"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Between these, sends and receives are one group of the transport's, where it has such;
  // collectives are recorded as ever.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override;
  // Collectives that this process has recorded.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // The transport's: Gloo refuses the hook and has nothing to time.
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  void registerOnCompletionHook(Hook&& hook) override;
  void enableCollectivesTiming() override;
  // Submits what is recorded, and waits for it and for what was sent. Throws where that fails, the
  // others do not take it within the group's timeout, or the user asks to stop.
  void waitForPendingWorks() override;

  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  // Submits what is recorded first, and waits until what was sent has been taken.
  void shutdown() override;

 private:
  // What a reduction of a tensor of some type asks for beyond what transports do.
  struct Reduction {
    int64_t op;
    at::Tensor factor;           // every operand is multiplied by it before; undefined: by nothing
    bool divides_after = false;  // integers: their sum is divided by the number of ranks
  };
  Reduction reduction(const c10d::ReduceOp& op, c10::ScalarType type, const char* what) const;

  // Records a call whose tensors need not be contiguous. `in_place`: outputs have contents before.
  // `asked`: the reduction that the program asked for, by which ranks are compared.
  WorkPtr call(Collective collective, const Tensors& outputs, const Tensors& inputs,
               std::chrono::milliseconds timeout, std::vector<int64_t> options,
               bool in_place = false, const c10d::ReduceOp* asked = nullptr);
  WorkPtr reduce_in_place(Collective collective, Tensors& tensors, const c10d::ReduceOp& op,
                          std::chrono::milliseconds timeout, std::vector<int64_t> rest);
  WorkPtr reduce_to(Collective collective, const Tensors& outputs, const Tensors& inputs,
                    const c10d::ReduceOp& op, std::chrono::milliseconds timeout);
  // What is sent, or received: contiguous tensors of the transport's device over the memory of
  // acc's.
  at::Tensor memory_of(const at::Tensor& tensor) const;
  void begin_with_contents(at::Tensor& memory, const at::Tensor& tensor) const;
  WorkPtr receive(Tensors& tensors, int from, int tag);
  void compare(const Messages::Message& message);
  WorkPtr receive_own(const at::Tensor& tensor, int tag);

  // What was called between startCoalescing and endCoalescing.
  struct Coalesced {
    Tensors tensors;
    std::vector<WorkPtr> works;  // but for sends, which are the transport's
  };
  // Whether this is between the two, and what was called now belongs to the others.
  bool coalesce(const Tensors& tensors, const WorkPtr& work = nullptr);
  // After an error nobody ends them: the next manager does, or the end of the group.
  std::optional<Coalesced> stop_coalescing();

  const c10::intrusive_ptr<c10d::Backend> transport_;
  const std::shared_ptr<const Connection> connection_;  // null: nothing is compared
  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Sends> sends_ = std::make_shared<Sends>();
  const int64_t group_;
  std::mutex calling_;
  c10::DeviceIndex device_ = -1;  // of the last call; with `calling_`
  std::atomic<uint64_t> sequence_ = 0;
  const std::shared_ptr<Loopback> loopback_ = std::make_shared<Loopback>();
  std::mutex coalescing_;
  std::optional<Coalesced> coalesced_;  // nothing: not between these two
};

}  // namespace acc::distributed
