#include "distributed/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/errors.h"
#include "distributed/groups.h"
#include "distributed/ledger.h"
#include "distributed/tags.h"
#include "distributed/transfer.h"

namespace acc::distributed {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;

// What a call asks for beside its tensors, without the timeout that is recorded before it.
struct Options : at::IntArrayRef {
  explicit Options(at::IntArrayRef recorded)
      : at::IntArrayRef(recorded.slice(1)), timeout(recorded[0]) {}

  std::chrono::milliseconds timeout;  // kUnsetTimeout: the group's
};

// The same memory as a flat tensor of another type, which keeps it.
Tensor flat(const Tensor& tensor, c10::ScalarType type) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const auto element = static_cast<int64_t>(c10::elementSize(type));
  // CUDA is not asked whose memory it is: of an empty tensor it is nobody's.
  return at::from_blob(
      tensor.data_ptr(), {bytes / element}, [tensor](void*) {},
      at::TensorOptions().dtype(type).device(tensor.device()), tensor.device());
}

// For what only moves: transports do not know all types.
Tensor bytes_of(const Tensor& tensor) { return flat(tensor, c10::kByte); }

Tensors bytes_of(const Tensors& tensors) {
  Tensors all;
  for (const Tensor& tensor : tensors) all.push_back(bytes_of(tensor));
  return all;
}

// What is added, compared or combined: truths as bytes of 0 and 1, complex numbers as their parts.
Tensor numbers_of(const Tensor& tensor) {
  if (tensor.scalar_type() == c10::kBool) return bytes_of(tensor);
  if (tensor.is_complex()) return flat(tensor, c10::toRealValueType(tensor.scalar_type()));
  return tensor;
}

Tensors numbers_of(const Tensors& tensors) {
  Tensors all;
  for (const Tensor& tensor : tensors) all.push_back(numbers_of(tensor));
  return all;
}

// Of truths a sum is an "or" and a product an "and", as in NCCL.
ReduceOp reduce_op(int64_t number, const Tensor& tensor) {
  const auto op = static_cast<ReduceOp::RedOpType>(number);
  if (tensor.scalar_type() != c10::kBool) return op;
  if (op == ReduceOp::SUM || op == ReduceOp::BOR) return ReduceOp::MAX;
  if (op == ReduceOp::PRODUCT || op == ReduceOp::BAND) return ReduceOp::MIN;
  return op;
}

void all_reduce(Backend& group, Tensors& outputs, Tensors&, Options options, Works& works) {
  for (const Tensor& output : outputs) {
    c10d::AllreduceOptions opts;
    opts.timeout = options.timeout;
    opts.reduceOp = reduce_op(options[0], output);
    Tensors tensors{numbers_of(output)};
    works.push_back(group.allreduce(tensors, opts));
  }
}

void broadcast(Backend& group, Tensors& outputs, Tensors&, Options options, Works& works) {
  for (const Tensor& output : outputs) {
    c10d::BroadcastOptions opts;
    opts.timeout = options.timeout;
    opts.rootRank = options[0];
    Tensors tensors{bytes_of(output)};
    works.push_back(group.broadcast(tensors, opts));
  }
}

void reduce(Backend& group, Tensors& outputs, Tensors&, Options options, Works& works) {
  c10d::ReduceOptions opts;
  opts.timeout = options.timeout;
  opts.reduceOp = reduce_op(options[0], outputs[0]);
  opts.rootRank = options[1];
  Tensors tensors{numbers_of(outputs[0])};
  works.push_back(group.reduce(tensors, opts));
}

void all_gather(Backend& group, Tensors& outputs, Tensors& inputs, Options options, Works& works) {
  c10d::AllgatherOptions opts;
  opts.timeout = options.timeout;
  std::vector<Tensors> lists{bytes_of(outputs)};
  Tensors tensors{bytes_of(inputs[0])};
  works.push_back(group.allgather(lists, tensors, opts));
}

void all_gather_into(Backend& group, Tensors& outputs, Tensors& inputs, Options options,
                     Works& works) {
  c10d::AllgatherOptions opts;
  opts.timeout = options.timeout;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Tensor output = bytes_of(outputs[i]);
    Tensor input = bytes_of(inputs[i]);
    works.push_back(group._allgather_base(output, input, opts));
  }
}

void gather(Backend& group, Tensors& outputs, Tensors& inputs, Options options, Works& works) {
  c10d::GatherOptions opts;
  opts.timeout = options.timeout;
  opts.rootRank = options[0];
  std::vector<Tensors> lists;
  if (!outputs.empty()) lists.push_back(bytes_of(outputs));
  Tensors tensors{bytes_of(inputs[0])};
  works.push_back(group.gather(lists, tensors, opts));
}

void scatter(Backend& group, Tensors& outputs, Tensors& inputs, Options options, Works& works) {
  c10d::ScatterOptions opts;
  opts.timeout = options.timeout;
  opts.rootRank = options[0];
  std::vector<Tensors> lists;
  if (!inputs.empty()) lists.push_back(bytes_of(inputs));
  Tensors tensors{bytes_of(outputs[0])};
  works.push_back(group.scatter(tensors, lists, opts));
}

void reduce_scatter(Backend& group, Tensors& outputs, Tensors& inputs, Options options,
                    Works& works) {
  c10d::ReduceScatterOptions opts;
  opts.timeout = options.timeout;
  opts.reduceOp = reduce_op(options[0], outputs[0]);
  Tensors tensors{numbers_of(outputs[0])};
  std::vector<Tensors> lists{numbers_of(inputs)};
  works.push_back(group.reduce_scatter(tensors, lists, opts));
}

void reduce_scatter_into(Backend& group, Tensors& outputs, Tensors& inputs, Options options,
                         Works& works) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    c10d::ReduceScatterOptions opts;
    opts.timeout = options.timeout;
    opts.reduceOp = reduce_op(options[0], outputs[i]);
    // Gloo divides along dimension 0, whether there is one or not.
    const auto row = [](const Tensor& tensor) { return tensor.view({tensor.numel()}); };
    Tensor output = row(numbers_of(outputs[i]));
    Tensor input = row(numbers_of(inputs[i]));
    works.push_back(group._reduce_scatter_base(output, input, opts));
  }
}

// A work of the transport, whose results go on to where they belong.
class CopyingWork final : public c10d::Work {
 public:
  CopyingWork(const c10::intrusive_ptr<c10d::Work>& inner, std::function<void()> copy)
      : Work(-1, c10d::OpType::ALLTOALL),
        future_(inner->getFuture()->then(
            [copy = std::move(copy)](c10::ivalue::Future& done) {
              done.value();  // throws what has failed
              // In Gloo's thread, which knows nothing of an inference mode that they were made in.
              const at::AutoDispatchBelowADInplaceOrView below;
              copy();
              return c10::IValue();
            },
            c10::NoneType::get())) {}

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Gloo has no lists here: their parts behind each other.
void all_to_all(Backend& group, Tensors& outputs, Tensors& inputs, Options options, Works& works) {
  c10d::AllToAllOptions opts;
  opts.timeout = options.timeout;
  Tensors received = bytes_of(outputs);
  Tensors sent = bytes_of(inputs);
  if (!outputs[0].is_cpu()) return works.push_back(group.alltoall(received, sent, opts));
  const auto sizes = [](const Tensors& parts) {
    std::vector<int64_t> bytes;
    for (const Tensor& part : parts) bytes.push_back(part.numel());
    return bytes;
  };
  const std::vector<int64_t> to = sizes(received);
  Tensor input = at::cat(sent);
  Tensor output = at::cat(received);  // of a part that comes short the rest stays as it was
  std::vector<int64_t> taken = to;    // Gloo moves out of these
  std::vector<int64_t> given = sizes(sent);
  const auto work = group.alltoall_base(output, input, taken, given, opts);
  works.push_back(c10::make_intrusive<CopyingWork>(work, [received, output, input, to]() mutable {
    const Tensors parts = output.split_with_sizes(to);
    for (size_t i = 0; i < parts.size(); ++i) received[i].copy_(parts[i]);
  }));
}

// Sizes of the parts in rows; none: equal parts.
void all_to_all_single(Backend& group, Tensors& outputs, Tensors& inputs, Options options,
                       Works& works) {
  const auto split = [](const Tensor& tensor, at::IntArrayRef rows) {
    std::vector<int64_t> bytes;
    const int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
    const int64_t row = all == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / all;
    for (const int64_t n : rows) bytes.push_back(n * row);
    return bytes;
  };
  const size_t received = static_cast<size_t>(options[0]);
  std::vector<int64_t> to = split(outputs[0], options.slice(1, received));
  std::vector<int64_t> from = split(inputs[0], options.slice(1 + received));
  Tensor output = bytes_of(outputs[0]);
  Tensor input = bytes_of(inputs[0]);
  c10d::AllToAllOptions opts;
  opts.timeout = options.timeout;
  works.push_back(group.alltoall_base(output, input, to, from, opts));
}

struct Kind {
  const char* name;
  void (*begin)(Backend& group, Tensors& outputs, Tensors& inputs, Options options, Works& works);
};

// In the order of Collective. outputs, inputs, options; after those of a reduction stands what the
// program asked for, which a transport may not have (an average):
constexpr std::array kKinds{
    Kind{"all_reduce", &all_reduce},                    // in place; reduce operation
    Kind{"broadcast", &broadcast},                      // in place; root
    Kind{"reduce", &reduce},                            // in place; reduce operation, root
    Kind{"all_gather", &all_gather},                    // one per rank, one
    Kind{"all_gather_into", &all_gather_into},          // pairs
    Kind{"gather", &gather},                            // one per rank or none, one; root
    Kind{"scatter", &scatter},                          // one, one per rank or none; root
    Kind{"reduce_scatter", &reduce_scatter},            // one, one per rank; reduce operation
    Kind{"reduce_scatter_into", &reduce_scatter_into},  // pairs; reduce operation
    Kind{"all_to_all", &all_to_all},                    // one per rank each
    Kind{"all_to_all_single", &all_to_all_single},      // one each; number of outputs' parts, parts
};

Tensors copies_of(at::TensorList list) { return {list.begin(), list.end()}; }

template <size_t kKind>
void begin(at::TensorList outputs, at::TensorList inputs, int64_t group, at::IntArrayRef recorded,
           int64_t ticket) {
  const Options options(recorded);
  Tensors to = copies_of(outputs);
  Tensors from = copies_of(inputs);
  const bool on_host = (to.empty() ? from : to)[0].is_cpu();
  const Group with = group_of(group);
  const uint64_t sequence = with.ledger->begin(static_cast<Collective>(kKind), to, from, options);
  if (sequence > 0) tag_by_history(*with.transport, with.ledger->history(sequence));
  Works works;
  const auto transfer = [&] {
    return transfer_of(std::move(works), on_host, with.ledger, sequence);
  };
  try {
    kKinds[kKind].begin(*with.transport, to, from, options, works);
  } catch (const std::exception& error) {
    // what has begun goes on
    if (!works.empty()) runtime::begin_transfer(ticket, transfer());
    C10_THROW_ERROR(DistBackendError, runtime::text_of(std::current_exception()));
  }
  if (ticket >= 0) return runtime::begin_transfer(ticket, transfer());
  if (const auto begun = transfer()) begun->wait();
}

void begin_meta(at::TensorList, at::TensorList, int64_t, at::IntArrayRef, int64_t) {}

void await(at::TensorList, at::TensorList, int64_t ticket) { runtime::end_transfer(ticket); }
void await_meta(at::TensorList, at::TensorList, int64_t) {}

std::string operator_name(size_t kind) { return std::string(kKinds[kind].name) + "_"; }

TORCH_LIBRARY_FRAGMENT(acc, m) {
  for (size_t kind = 0; kind < kKinds.size(); ++kind) {
    const std::string schema =
        operator_name(kind) +
        "(Tensor(a!)[] outputs, Tensor[] inputs, int group, int[] options, int ticket) -> ()";
    m.def(schema.c_str());
  }
  m.def("await_(Tensor(a!)[] outputs, Tensor[] inputs, int ticket) -> ()");
}

template <size_t... kKind>
void register_kernels(torch::Library& m, std::index_sequence<kKind...>) {
  (m.impl(operator_name(kKind).c_str(), &begin<kKind>), ...);
  m.impl("await_", &await);
}

TORCH_LIBRARY_IMPL(acc, CPU, m) { register_kernels(m, std::make_index_sequence<kKinds.size()>()); }
TORCH_LIBRARY_IMPL(acc, CUDA, m) { register_kernels(m, std::make_index_sequence<kKinds.size()>()); }
TORCH_LIBRARY_IMPL(acc, Meta, m) {
  for (size_t kind = 0; kind < kKinds.size(); ++kind) {
    m.impl(operator_name(kind).c_str(), &begin_meta);
  }
  m.impl("await_", &await_meta);
}

}  // namespace

const char* name(Collective collective) { return kKinds[static_cast<size_t>(collective)].name; }

void record(Collective collective, std::vector<Tensor> outputs, std::vector<Tensor> inputs,
            int64_t group, std::chrono::milliseconds timeout, std::vector<int64_t> options) {
  options.insert(options.begin(), timeout.count());
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      ("acc::" + operator_name(static_cast<size_t>(collective))).c_str(), "");
  constexpr int64_t kNoTicket = -1;
  torch::jit::Stack stack;
  torch::jit::push(stack, std::move(outputs), std::move(inputs), group, std::move(options),
                   kNoTicket);
  handle.callBoxed(&stack);
}

}  // namespace acc::distributed
