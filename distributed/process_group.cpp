#include "distributed/process_group.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <array>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/on_device.h"
#include "distributed/behind.h"
#include "distributed/groups.h"
#include "distributed/tags.h"
#include "distributed/transfer.h"
#include "distributed/watch.h"
#include "distributed/work.h"
#include "lazy/record/watch.h"
#include "lazy/session/session.h"

namespace acc::distributed {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = ProcessGroupACC::Tensors;
using WorkPtr = ProcessGroupACC::WorkPtr;

OpType type_of(Collective collective) {
  // In the order of Collective.
  static constexpr std::array kTypes{
      OpType::ALLREDUCE, OpType::BROADCAST,       OpType::REDUCE,
      OpType::ALLGATHER, OpType::_ALLGATHER_BASE, OpType::GATHER,
      OpType::SCATTER,   OpType::REDUCE_SCATTER,  OpType::_REDUCE_SCATTER_BASE,
      OpType::ALLTOALL,  OpType::ALLTOALL_BASE,   OpType::COALESCED};
  return kTypes[static_cast<size_t>(collective)];
}

void check_tensors(const char* what, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "[torch.distributed] ", what, " got no tensor.");
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(runtime::on_acc(tensor), "[torch.distributed] ", what,
                " of the process group \"acc\" got a tensor on ", tensor.device(),
                ". Move it with .to(\"acc\"), or make the group with "
                "init_process_group(\"cpu:gloo,acc:acc\").");
    TORCH_CHECK(tensor.layout() == c10::kStrided, "[torch.distributed] ", what,
                " takes dense tensors, got one with layout ", tensor.layout(), ".");
    TORCH_CHECK(tensor.device() == tensors[0].device(), "[torch.distributed] ", what,
                " takes tensors on one device, got ", tensors[0].device(), " and ", tensor.device(),
                ".");
  }
}

void check_types(const char* what, const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "[torch.distributed] ", what,
                " takes tensors of one type, got ", tensors[0].scalar_type(), " and ",
                tensor.scalar_type(), ".");
  }
}

void check_count(const char* what, const char* name, size_t count, size_t expected) {
  TORCH_CHECK(count == expected, "[torch.distributed] ", what, " takes ", expected, " ", name,
              ", got ", count, ".");
}

// `all` holds `part` of each of `ranks` processes.
void check_parts(const char* what, const Tensor& all, const Tensor& part, int ranks) {
  check_types(what, {all, part});
  TORCH_CHECK(all.numel() == part.numel() * ranks, "[torch.distributed] ", what, ": a part of ",
              part.numel(), " elements from each of ", ranks, " ranks is ", part.numel() * ranks,
              " elements, and the whole tensor has ", all.numel(), ".");
}

void check_equal_sizes(const char* what, const Tensors& tensors, const Tensor& like) {
  check_types(what, tensors);
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.numel() == like.numel(), "[torch.distributed] ", what,
                " takes tensors of one size, got ", tensor.sizes(), " and ", like.sizes(), ".");
  }
}

// What a process sends to itself is what it receives from itself. Of the sizes that it exchanges
// with others each of both knows its own.
void check_own_part(const char* what, int64_t sent, int64_t received) {
  TORCH_CHECK(sent == received, "[torch.distributed] ", what, ": this rank sends ", sent,
              " elements to itself, and has room for ", received, ".");
}

void check_rank(const char* what, int64_t rank, int size) {
  TORCH_CHECK(rank >= 0 && rank < size, "[torch.distributed] ", what, ": rank ", rank,
              " is not in this group, whose ranks are 0 to ", size - 1, ".");
}

// Of what is sent, or received: "4 Float".
std::string message_text(const Tensor& tensor) {
  return base::concat(tensor.numel(), " ", tensor.scalar_type());
}

bool is_bitwise(int64_t op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// What Gloo and NCCL compute with; each has some more.
void check_reduces(const char* what, int64_t op, c10::ScalarType type) {
  static constexpr std::array kTypes{
      c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16,     c10::kChar,         c10::kByte,
      c10::kInt,   c10::kLong,   c10::kBool, c10::kComplexFloat, c10::kComplexDouble};
  TORCH_CHECK_TYPE(std::ranges::find(kTypes, type) != kTypes.end(), "[torch.distributed] ", what,
                   " does not take ", type,
                   ". Convert the tensor, for example to int32 or float32.");
  TORCH_CHECK_TYPE(!is_bitwise(op) || c10::isIntegralType(type, /*includeBool=*/true),
                   "[torch.distributed] ", what, ": bitwise operations take integers, got ", type,
                   ".");
  TORCH_CHECK_TYPE(!c10::isComplexType(type) || op == ReduceOp::SUM || op == ReduceOp::AVG ||
                       op == ReduceOp::PREMUL_SUM,
                   "[torch.distributed] ", what,
                   " of complex numbers can add them and nothing else.");
  TORCH_CHECK_TYPE(type != c10::kBool || (op != ReduceOp::BXOR && op != ReduceOp::AVG),
                   "[torch.distributed] ", what,
                   " of booleans has no BXOR and no average. Convert the tensor to uint8.");
}

}  // namespace

ProcessGroupACC::ProcessGroupACC(c10::intrusive_ptr<c10d::Backend> transport,
                                 const c10::intrusive_ptr<c10d::Store>& store)
    : Backend(transport->getRank(), transport->getSize()),
      transport_(std::move(transport)),
      connection_(size_ > 1 && store != nullptr ? connection_to(store) : nullptr),
      ledger_(std::make_shared<Ledger>(
          connection_ == nullptr ? nullptr : beside(store, *connection_, "ledger"), rank_, size_,
          transport_->getBackendOptions()->global_ranks_in_group,
          transport_->getBackendOptions()->timeout)),
      group_(add_group({transport_, ledger_, sends_})) {
  watch_groups();
}

ProcessGroupACC::~ProcessGroupACC() {
  ledger_->end();  // works may outlive the group, and have it
  remove_group(group_);
  // Gloo's threads may wait for ranks that do something else, up to the group's timeout, and its
  // end would wait for them.
  if (runtime::on_host() && !ledger_->failure().empty()) {
    static auto& kept = *new std::vector<c10::intrusive_ptr<c10d::Backend>>;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    kept.push_back(transport_);
  }
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupACC::getBackendOptions() {
  const auto inner = transport_->getBackendOptions();
  auto options = c10::make_intrusive<Options>("acc", inner->timeout);
  options->group_name = inner->group_name;
  options->group_desc = inner->group_desc;
  options->global_ranks_in_group = inner->global_ranks_in_group;
  return options;
}

void ProcessGroupACC::setTimeout(std::chrono::milliseconds timeout) {
  transport_->setTimeout(timeout);
  ledger_->set_timeout(timeout);
}

ProcessGroupACC::Reduction ProcessGroupACC::reduction(const ReduceOp& op, c10::ScalarType type,
                                                      const char* what) const {
  Reduction made{static_cast<int64_t>(op.op_), Tensor(), false};
  check_reduces(what, made.op, type);
  const auto scaled_by = [&](double factor) {
    made.factor = at::scalar_tensor(factor, at::TensorOptions().dtype(c10::kDouble));
  };
  if (made.op == ReduceOp::AVG) {
    made.op = ReduceOp::SUM;
    if (c10::isIntegralType(type, /*includeBool=*/true)) {
      made.divides_after = true;
    } else {
      scaled_by(1.0 / size_);
    }
  } else if (made.op == ReduceOp::PREMUL_SUM) {
    made.op = ReduceOp::SUM;
    const auto* by = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(by != nullptr, "[torch.distributed] ", what,
                ": PREMUL_SUM needs its factor: torch.distributed._make_nccl_premul_sum(factor).");
    TORCH_CHECK_TYPE(!c10::isIntegralType(type, /*includeBool=*/true), "[torch.distributed] ", what,
                     ": PREMUL_SUM takes floating point numbers, got ", type, ".");
    if (by->tensor_factor.defined()) {
      made.factor = by->tensor_factor.reshape({}).to(type);  // a number: no operand is promoted
    } else {
      scaled_by(by->double_factor);
    }
  }
  return made;
}

WorkPtr ProcessGroupACC::call(Collective collective, const Tensors& outputs, const Tensors& inputs,
                              std::chrono::milliseconds timeout, std::vector<int64_t> options,
                              bool in_place, const ReduceOp* asked) {
  Tensors all = outputs;
  all.insert(all.end(), inputs.begin(), inputs.end());
  check_tensors(name(collective), all);
  const c10::DeviceIndex device = all[0].device().index();
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensors to;
  for (const Tensor& output : outputs) {
    at::assert_no_internal_overlap(output);
    if (output.is_contiguous()) {
      to.push_back(output);
    } else {
      to.push_back(in_place ? output.contiguous() : at::empty(output.sizes(), output.options()));
    }
  }
  Tensors from;
  for (const Tensor& input : inputs) from.push_back(input.contiguous());
  if (asked != nullptr) options.push_back(static_cast<int64_t>(asked->op_));
  const uint64_t sequence = [&] {
    // What is noted first begins first, also where several threads call.
    const runtime::LockWithoutGil lock(calling_);
    // Each device has a trace of its own. What this group has pending is on the last call's; what
    // others have on other devices may wait for what this process does next with this one.
    if (device != device_ && ledger_->pending_for(std::chrono::milliseconds(0))) {
      session::flush(device_, record::FlushReason::kExchange);
    }
    device_ = device;
    ++sequence_;
    const uint64_t number = ledger_->note(collective, outputs, inputs, options);
    try {
      record(collective, to, std::move(from), group_, timeout, std::move(options));
    } catch (...) {
      ledger_->take_back(number);
      throw;
    }
    ledger_->recorded(number);
    return number;
  }();
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!to[i].is_same(outputs[i])) outputs[i].copy_(to[i]);
  }
  auto work =
      c10::make_intrusive<RecordedWork>(type_of(collective), outputs, device, sequence, ledger_);
  coalesce(outputs, work);
  return work;
}

WorkPtr ProcessGroupACC::reduce_in_place(Collective collective, Tensors& tensors,
                                         const ReduceOp& op, std::chrono::milliseconds timeout,
                                         std::vector<int64_t> rest) {
  const char* what = name(collective);
  check_tensors(what, tensors);
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Reduction> by;  // of each: several at once may be of several types
  for (const Tensor& tensor : tensors) {
    by.push_back(reduction(op, tensor.scalar_type(), what));
    at::assert_no_internal_overlap(tensor);
  }
  rest.insert(rest.begin(), by[0].op);
  // Who gets no result keeps what it had.
  const bool bystander = collective == Collective::kReduce && rank_ != rest[1];
  Tensors to = tensors;
  if (bystander) to[0] = tensors[0].clone();
  if (to.size() == 1) {
    if (by[0].factor.defined()) to[0].mul_(by[0].factor);
  } else {
    // All before the first is changed: one of them may have no valid contents.
    Tensors scaled(to.size());
    for (size_t i = 0; i < to.size(); ++i) {
      if (by[i].factor.defined()) scaled[i] = at::mul(to[i], by[i].factor);
    }
    for (size_t i = 0; i < to.size(); ++i) {
      if (scaled[i].defined()) to[i].copy_(scaled[i]);
    }
  }
  WorkPtr work = call(collective, to, {}, timeout, std::move(rest), /*in_place=*/true, &op);
  for (size_t i = 0; i < to.size(); ++i) {
    if (by[i].divides_after && !bystander) to[i].div_(size_, "trunc");
  }
  if (!bystander) return work;
  return c10::make_intrusive<RecordedWork>(type_of(collective), tensors,
                                           tensors[0].device().index(), work->getSequencenumber(),
                                           ledger_);
}

WorkPtr ProcessGroupACC::reduce_to(Collective collective, const Tensors& outputs,
                                   const Tensors& inputs, const ReduceOp& op,
                                   std::chrono::milliseconds timeout) {
  const char* what = name(collective);
  check_tensors(what, outputs);
  check_tensors(what, inputs);
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Reduction> by;  // of each output
  for (const Tensor& output : outputs) by.push_back(reduction(op, output.scalar_type(), what));
  Tensors from = inputs;
  for (size_t i = 0; i < from.size(); ++i) {
    const Tensor& factor = by[by.size() == 1 ? 0 : i].factor;
    if (factor.defined()) from[i] = at::mul(from[i], factor);
  }
  WorkPtr work = call(collective, outputs, from, timeout, {by[0].op}, /*in_place=*/false, &op);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (by[i].divides_after) Tensor(outputs[i]).div_(size_, "trunc");
  }
  return work;
}

WorkPtr ProcessGroupACC::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return reduce_in_place(Collective::kAllReduce, tensors, opts.reduceOp, opts.timeout, {});
}

WorkPtr ProcessGroupACC::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  return reduce_in_place(Collective::kAllReduce, tensors, opts.reduceOp, opts.timeout, {});
}

WorkPtr ProcessGroupACC::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_tensors("broadcast", tensors);
  check_rank("broadcast", opts.rootRank, size_);
  return call(Collective::kBroadcast, tensors, {}, opts.timeout, {opts.rootRank},
              /*in_place=*/true);
}

WorkPtr ProcessGroupACC::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_count("reduce", "tensor", tensors.size(), 1);
  check_rank("reduce", opts.rootRank, size_);
  return reduce_in_place(Collective::kReduce, tensors, opts.reduceOp, opts.timeout,
                         {opts.rootRank});
}

WorkPtr ProcessGroupACC::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  check_count("all_gather", "list of tensors", outputs.size(), 1);
  check_count("all_gather", "tensor", inputs.size(), 1);
  check_count("all_gather", "output tensors", outputs[0].size(), static_cast<size_t>(size_));
  check_tensors("all_gather", outputs[0]);
  check_tensors("all_gather", inputs);
  check_types("all_gather", {outputs[0][0], inputs[0]});
  check_equal_sizes("all_gather", outputs[0], inputs[0]);
  return call(Collective::kAllGather, outputs[0], inputs, opts.timeout, {});
}

WorkPtr ProcessGroupACC::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  // One list per rank; all_gather takes one per tensor.
  check_count("all_gather_coalesced", "lists", outputs.size(), static_cast<size_t>(size_));
  Tensors results;
  uint64_t last = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> lists(1);
    for (const Tensors& of_rank : outputs) {
      check_count("all_gather_coalesced", "tensors per list", of_rank.size(), inputs.size());
      lists[0].push_back(of_rank[i]);
    }
    Tensors input{inputs[i]};
    last = allgather(lists, input, opts)->getSequencenumber();
  }
  for (const Tensors& of_rank : outputs) {
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  const c10::DeviceIndex device = inputs.empty() ? -1 : inputs[0].device().index();
  return c10::make_intrusive<RecordedWork>(OpType::ALLGATHER_COALESCED, std::move(results), device,
                                           last, ledger_);
}

WorkPtr ProcessGroupACC::_allgather_base(Tensor& output, Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupACC::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  const char* what = name(Collective::kAllGatherInto);
  check_count(what, "inputs, one per output", inputs.size(), outputs.size());
  check_tensors(what, outputs);
  check_tensors(what, inputs);
  for (size_t i = 0; i < outputs.size(); ++i) check_parts(what, outputs[i], inputs[i], size_);
  return call(Collective::kAllGatherInto, outputs, inputs, opts.timeout, {});
}

WorkPtr ProcessGroupACC::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  check_count("gather", "tensor", inputs.size(), 1);
  check_rank("gather", opts.rootRank, size_);
  check_tensors("gather", inputs);
  const bool root = rank_ == opts.rootRank;
  check_count("gather", "lists of output tensors on this rank", outputs.size(), root ? 1 : 0);
  Tensors to;
  if (root) {
    to = outputs[0];
    check_count("gather", "output tensors", to.size(), static_cast<size_t>(size_));
    check_tensors("gather", to);
    check_types("gather", {to[0], inputs[0]});
    check_equal_sizes("gather", to, inputs[0]);
  }
  return call(Collective::kGather, to, inputs, opts.timeout, {opts.rootRank});
}

WorkPtr ProcessGroupACC::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& opts) {
  check_count("scatter", "output tensor", outputs.size(), 1);
  check_rank("scatter", opts.rootRank, size_);
  check_tensors("scatter", outputs);
  const bool root = rank_ == opts.rootRank;
  check_count("scatter", "lists of input tensors on this rank", inputs.size(), root ? 1 : 0);
  Tensors from;
  if (root) {
    from = inputs[0];
    check_count("scatter", "input tensors", from.size(), static_cast<size_t>(size_));
    check_tensors("scatter", from);
    check_types("scatter", {from[0], outputs[0]});
    check_equal_sizes("scatter", from, outputs[0]);
  }
  return call(Collective::kScatter, outputs, from, opts.timeout, {opts.rootRank});
}

WorkPtr ProcessGroupACC::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  const char* what = name(Collective::kReduceScatter);
  check_count(what, "output tensor", outputs.size(), 1);
  check_count(what, "list of input tensors", inputs.size(), 1);
  check_count(what, "input tensors", inputs[0].size(), static_cast<size_t>(size_));
  check_types(what, {inputs[0][0], outputs[0]});
  check_equal_sizes(what, inputs[0], outputs[0]);
  return reduce_to(Collective::kReduceScatter, outputs, inputs[0], opts.reduceOp, opts.timeout);
}

WorkPtr ProcessGroupACC::_reduce_scatter_base(Tensor& output, Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupACC::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  const char* what = name(Collective::kReduceScatterInto);
  check_count(what, "inputs, one per output", inputs.size(), outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) check_parts(what, inputs[i], outputs[i], size_);
  return reduce_to(Collective::kReduceScatterInto, outputs, inputs, opts.reduceOp, opts.timeout);
}

WorkPtr ProcessGroupACC::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  const char* what = name(Collective::kAllToAll);
  check_count(what, "output tensors", outputs.size(), static_cast<size_t>(size_));
  check_count(what, "input tensors", inputs.size(), static_cast<size_t>(size_));
  check_tensors(what, outputs);
  check_tensors(what, inputs);
  check_types(what, outputs);
  check_types(what, {outputs[0], inputs[0]});
  check_types(what, inputs);
  const auto own = static_cast<size_t>(rank_);
  check_own_part(what, inputs[own].numel(), outputs[own].numel());
  return call(Collective::kAllToAll, outputs, inputs, opts.timeout, {}, /*in_place=*/true);
}

WorkPtr ProcessGroupACC::alltoall_base(Tensor& output, Tensor& input,
                                       std::vector<int64_t>& output_rows,
                                       std::vector<int64_t>& input_rows,
                                       const c10d::AllToAllOptions& opts) {
  const char* what = name(Collective::kAllToAllSingle);
  check_tensors(what, {output, input});
  check_types(what, {output, input});
  std::vector<int64_t> options{static_cast<int64_t>(output_rows.size())};
  // Returns how many elements go to this rank itself, or come from it.
  const auto add = [&](const Tensor& tensor, const std::vector<int64_t>& rows) {
    const int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (rows.empty()) {
      TORCH_CHECK(all % size_ == 0, "[torch.distributed] ", what, ": ", all,
                  " rows cannot be divided among ", size_, " ranks. Pass split sizes.");
    } else {
      check_count(what, "split sizes", rows.size(), static_cast<size_t>(size_));
      int64_t sum = 0;
      for (const int64_t n : rows) sum += n;
      TORCH_CHECK(sum == all, "[torch.distributed] ", what, ": the split sizes add up to ", sum,
                  ", and the tensor has ", all, " rows.");
    }
    options.insert(options.end(), rows.begin(), rows.end());
    if (rows.empty()) return tensor.numel() / size_;
    return all == 0 ? 0 : rows[static_cast<size_t>(rank_)] * (tensor.numel() / all);
  };
  const int64_t received = add(output, output_rows);
  check_own_part(what, add(input, input_rows), received);
  return call(Collective::kAllToAllSingle, {output}, {input}, opts.timeout, std::move(options),
              /*in_place=*/true);
}

Tensor ProcessGroupACC::memory_of(const Tensor& tensor) const {
  return session::alias(tensor, record::FlushReason::kExchange);
}

WorkPtr ProcessGroupACC::send(Tensors& tensors, int to, int tag) {
  check_count("send", "tensor", tensors.size(), 1);
  check_tensors("send", tensors);
  check_rank("send", to, size_);
  const Behind behind(base::concat("send to ", ledger_->name(to)));
  const at::AutoDispatchBelowADInplaceOrView below;
  if (runtime::on_host() && to == rank_) {
    loopback_->send(tag, tensors[0].clone(at::MemoryFormat::Contiguous));
    return c10::make_intrusive<RecordedWork>(OpType::SEND, tensors, -1, sequence_);
  }
  Tensors memory{memory_of(tensors[0].contiguous())};
  // Whoever takes it may do so after this process has gone on to overwrite it.
  if (runtime::on_host()) memory[0] = memory[0].clone();
  const runtime::OnDevice on_device(tensors[0].device().index());
  const Messages::Message message{true, to, tag, message_text(tensors[0])};
  compare(message);
  const auto begin = [&] {
    WorkPtr work = transport_->send(memory, to, tag);
    ledger_->count(message);
    return work;
  };
  if (runtime::on_host()) {
    const uint64_t number = sends_->add(begin, memory[0], ledger_->timeout());
    auto sent = c10::make_intrusive<SentWork>(tensors, sequence_, sends_, number);
    coalesce(tensors, sent);
    return sent;
  }
  WorkPtr work = begin();
  if (coalesce(tensors)) return work;
  return c10::make_intrusive<BegunWork>(OpType::SEND, Works{std::move(work)}, tensors, ledger_, 0);
}

WorkPtr ProcessGroupACC::recv(Tensors& tensors, int from, int tag) {
  check_count("recv", "tensor", tensors.size(), 1);
  check_tensors("recv", tensors);
  check_rank("recv", from, size_);
  if (runtime::on_host() && from == rank_) return receive_own(tensors[0], tag);
  return receive(tensors, from, tag);
}

WorkPtr ProcessGroupACC::recvAnysource(Tensors& tensors, int tag) {
  check_count("recv", "tensor", tensors.size(), 1);
  check_tensors("recv", tensors);
  if (runtime::on_host() && loopback_->has(tag)) return receive_own(tensors[0], tag);
  return receive(tensors, -1, tag);
}

// A message may be shorter than the tensor, whose rest Gloo leaves as it was. What that is may be
// known only behind collectives that are recorded: a receive does not wait for these.
void ProcessGroupACC::begin_with_contents(Tensor& memory, const Tensor& tensor) const {
  const auto waits = [](const auto& ledger) {
    return ledger->pending_for(std::chrono::milliseconds(0));
  };
  if (session::poison_of(tensor) != nullptr || std::ranges::any_of(all_ledgers(), waits)) {
    memory.zero_();
  } else {
    memory.copy_(memory_of(tensor));
  }
}

// NCCL takes no error in the middle of a group of operations.
void ProcessGroupACC::compare(const Messages::Message& message) {
  {
    const std::lock_guard lock(coalescing_);
    if (!runtime::on_host() && coalesced_.has_value()) return;
  }
  ledger_->begin(message);
}

WorkPtr ProcessGroupACC::receive_own(const Tensor& tensor, int tag) {
  auto work = c10::make_intrusive<LoopbackWork>(loopback_, rank_, tag, tensor);
  coalesce({tensor}, work);
  return work;
}

// `from`: negative for whoever sends first.
WorkPtr ProcessGroupACC::receive(Tensors& tensors, int from, int tag) {
  const at::AutoDispatchBelowADInplaceOrView below;
  // A replay would receive nothing, and copy once more what has come now.
  if (record::watching()) {
    record::note_cut(record::FlushReason::kExchange, tensors[0].device().index());
  }
  // A tensor of its own: nothing that is recorded meanwhile moves or frees its memory.
  const Tensor received = at::empty(tensors[0].sizes(), tensors[0].options());
  Tensors memory{memory_of(received)};
  if (runtime::on_host()) begin_with_contents(memory[0], tensors[0]);
  const runtime::OnDevice on_device(received.device().index());
  const Messages::Message message{false, from, tag, message_text(received)};
  compare(message);
  WorkPtr work =
      from < 0 ? transport_->recvAnysource(memory, tag) : transport_->recv(memory, from, tag);
  ledger_->count(message);
  Works works;
  if (work != nullptr) works.push_back(std::move(work));  // else it is the group's
  auto begun = c10::make_intrusive<BegunWork>(from < 0 ? OpType::RECVANYSOURCE : OpType::RECV,
                                              std::move(works), tensors, ledger_, 0);
  begun->then_copy(received, tensors[0]);
  coalesce(tensors, begun);
  return begun;
}

void ProcessGroupACC::startCoalescing() {
  TORCH_CHECK(!stop_coalescing().has_value(),
              "[torch.distributed] an error has ended a group of operations before all of it was "
              "called. Call it again.");
  // What is recorded has collectives of its own, which do not belong to the group of these.
  if (!runtime::on_host()) session::flush(-1, record::FlushReason::kExchange);
  {
    const std::lock_guard lock(coalescing_);
    coalesced_.emplace();
  }
  if (!runtime::on_host() && transport_->supportsCoalescing()) transport_->startCoalescing();
}

bool ProcessGroupACC::coalesce(const Tensors& tensors, const WorkPtr& work) {
  const std::lock_guard lock(coalescing_);
  if (!coalesced_.has_value()) return false;
  coalesced_->tensors.insert(coalesced_->tensors.end(), tensors.begin(), tensors.end());
  if (work != nullptr) coalesced_->works.push_back(work);
  return true;
}

std::optional<ProcessGroupACC::Coalesced> ProcessGroupACC::stop_coalescing() {
  const std::lock_guard lock(coalescing_);
  return std::exchange(coalesced_, std::nullopt);
}

WorkPtr ProcessGroupACC::endCoalescing() {
  auto [all, works] = stop_coalescing().value_or(Coalesced{});
  // On a GPU what was begun is the group's, which begins now.
  WorkPtr group;
  if (!runtime::on_host() && transport_->supportsCoalescing()) group = transport_->endCoalescing();
  if (works.empty() && group == nullptr) {
    return c10::make_intrusive<RecordedWork>(OpType::COALESCED, std::move(all), -1, sequence_);
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works), std::move(group), std::move(all));
}

WorkPtr ProcessGroupACC::barrier(const c10d::BarrierOptions& opts) {
  const Behind behind("barrier");
  session::flush(-1, record::FlushReason::kExplicit);
  c10d::BarrierOptions inner = opts;
  inner.device.reset();
  if (!runtime::on_host() && inner.device_ids.empty()) {
    inner.device_ids = {runtime::backend().current_device()};
  }
  uint64_t sequence = 0;
  WorkPtr work;
  {
    const runtime::LockWithoutGil lock(calling_);
    // What other threads have recorded meanwhile was noted before it, and begins before it.
    session::flush(-1, record::FlushReason::kExplicit);
    ++sequence_;
    ledger_->note("barrier");
    sequence = ledger_->begin();
    if (sequence > 0) tag_by_history(*transport_, ledger_->history(sequence));
    const runtime::OnDevice on_device(runtime::backend().current_device());
    work = transport_->barrier(inner);
  }
  return c10::make_intrusive<BegunWork>(OpType::BARRIER, Works{std::move(work)}, Tensors(), ledger_,
                                        sequence);
}

void ProcessGroupACC::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const Behind behind("monitored_barrier");
  session::flush(-1, record::FlushReason::kExplicit);
  transport_->monitoredBarrier(opts, wait_all_ranks);
}

void ProcessGroupACC::setSequenceNumberForGroup() { transport_->setSequenceNumberForGroup(); }

c10d::ErrorType ProcessGroupACC::getError() {
  if (!ledger_->failure().empty()) return c10d::ErrorType::REMOTE_ERROR;
  return runtime::on_host() ? c10d::ErrorType::SUCCESS : transport_->getError();
}

void ProcessGroupACC::registerOnCompletionHook(Hook&& hook) {
  transport_->registerOnCompletionHook(std::move(hook));
}

void ProcessGroupACC::waitForPendingWorks() {
  session::flush(-1, record::FlushReason::kExplicit);
  if (!runtime::on_host()) return transport_->waitForPendingWorks();
  sends_->wait(transport_->getBackendOptions()->timeout);
}

void ProcessGroupACC::enableCollectivesTiming() { transport_->enableCollectivesTiming(); }

void ProcessGroupACC::eagerConnectSingleDevice(at::Device device) {
  if (!runtime::on_host()) {
    transport_->eagerConnectSingleDevice(at::Device(c10::kCUDA, device.index()));
  }
}

void ProcessGroupACC::abort() {
  stop_coalescing();
  ledger_->give_up();  // who waits for Gloo looks there
  transport_->abort();
  ledger_->end();
}

// The others get what they still wait for, and the group ends whatever came of that.
void ProcessGroupACC::shutdown() {
  const Behind behind("the end of the group");
  stop_coalescing();
  try {
    session::flush(-1, record::FlushReason::kExplicit);
    sends_->wait(transport_->getBackendOptions()->timeout);
    ledger_->last_look();
  } catch (...) {
    TORCH_WARN("[torch.distributed] a process group was destroyed with an error: ",
               runtime::text_of(std::current_exception()));
  }
  transport_->shutdown();
  ledger_->end();
}

}  // namespace acc::distributed
