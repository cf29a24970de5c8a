#include "lazy/record/recorder.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "lazy/graph/words.h"
#include "lazy/record/call.h"
#include "lazy/record/infer.h"
#include "lazy/record/watch.h"

namespace acc::record {
namespace {

using base::count;
using base::Counter;
using graph::Tag;

std::atomic<uint64_t> next_trace{1};
Locator locator;

size_t result_bytes(const graph::TensorWords& tensor) {
  return at::detail::computeStorageNbytes(
      c10::IntArrayRef(tensor.sizes.data(), tensor.sizes.size()),
      c10::IntArrayRef(tensor.strides.data(), tensor.strides.size()),
      graph::element_bytes(tensor.dtype));
}

}  // namespace

void install_locator(const Locator& installed) { locator = installed; }

uint32_t source_here() { return locator.here != nullptr ? locator.here() : 0; }

Recorder& recorder(c10::DeviceIndex device) {
  // Made once for all indices that can occur, never destroyed: tensors outlive static objects.
  static auto* const recorders = [] {
    auto* const list = new std::vector<std::unique_ptr<Recorder>>;
    for (int i = 0; i < base::env::kMaxHostDevices; ++i) {
      list->push_back(std::make_unique<Recorder>(static_cast<c10::DeviceIndex>(i)));
    }
    return list;
  }();
  return *recorders->at(static_cast<size_t>(device));
}

void note_view(c10::DeviceIndex device) {
  if (locator.note_view != nullptr && !recorder(device).following()) locator.note_view();
}

namespace {

// The calls that a thread is recording. Kept, so that recording allocates nothing once the vectors
// have grown. There is more than one when a Meta kernel runs Python, and Python an operator: a
// finalizer, a signal handler.
class CallLease {
 public:
  CallLease() : own_(depth_++) {
    if (own_ == calls_.size()) calls_.push_back(std::make_unique<Call>());
  }
  ~CallLease() { --depth_; }
  CallLease(const CallLease&) = delete;
  CallLease& operator=(const CallLease&) = delete;
  Call& operator*() const { return *calls_[own_]; }

 private:
  static inline thread_local std::vector<std::unique_ptr<Call>> calls_;
  static inline thread_local size_t depth_ = 0;
  const size_t own_;
};

// Whether this thread runs a plan, of whatever device.
thread_local bool runs_plan = false;

}  // namespace

Recorder::Recorder(c10::DeviceIndex device) : device_(device) { begin(next_trace++); }

void Recorder::begin(uint64_t number) {
  number_ = number;
  begin_trace(device_, number);
}

namespace {

// Whether autograd has made a node for the call, if it has a gradient at all.
bool is_differentiable(const graph::Op& op, const torch::jit::Stack& stack) {
  if (!c10::GradMode::is_enabled()) return false;
  const auto needs_gradient = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  for (size_t i = stack.size() - op.arguments.size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && needs_gradient(stack[i].toTensor())) return true;
    if (stack[i].isTensorList() && std::ranges::any_of(stack[i].toTensorVector(), needs_gradient)) {
      return true;
    }
  }
  return false;
}

}  // namespace

runtime::LockWithoutGil Recorder::lock() {
  ACC_CHECK(
      !runs_plan,
      "[acc] a kernel uses tensors of acc while the step that called it runs. Compute with the "
      "tensors that the kernel was given, or call it outside of recorded operators.");
  return runtime::LockWithoutGil(mutex_);
}

void Recorder::begin_run() { running_ = runs_plan = true; }
void Recorder::end_run() { running_ = runs_plan = false; }
bool Recorder::runs_here() { return runs_plan; }

Recorded Recorder::record(const graph::Op& op, const c10::OperatorHandle& handle,
                          torch::jit::Stack* stack) {
  // Asked once per trace: a profiler that begins in the middle of one has to wait for the next.
  if (pending() == 0 && locator.profiled != nullptr) {
    profiled_ = locator.profiled();
    watched_ = watching();
  }
  uint32_t place = 0;
  if (profiled_.load(std::memory_order_relaxed)) {
    place = locator.of_profiled(op, is_differentiable(op, *stack));
  } else if (watched_.load(std::memory_order_relaxed)) {
    // The step that it follows may be another function's.
    place = locator.of_operator(op, is_differentiable(op, *stack));
  }
  return take_call(op, handle, stack, place);
}

void Recorder::note_place(uint32_t place) {
  if (place == 0) return;
  places_.resize(n_nodes_);  // calls that failed may have left more, calls without a place fewer
  places_.back() = place;
}

Recorded Recorder::take_call(const graph::Op& op, const c10::OperatorHandle& handle,
                             torch::jit::Stack* stack, uint32_t place) {
  const uint64_t ambient = runtime::ambient_word(op.precision_sensitive);
  const size_t n_arguments = op.arguments.size();
  {
    const auto locked = lock();
    if (locked.was_interrupted()) return Recorded::kInterrupted;
    if (suspended()) return Recorded::kSuspended;
    if (expected_ != nullptr && follow(op, ambient, stack)) {
      note_place(place);
      return Recorded::kYes;
    }
  }

  const CallLease lease;
  Call& call = *lease;
  call.begin(op, ambient);
  const size_t base = stack->size() - n_arguments;
  for (size_t i = 0; i < n_arguments; ++i) {
    if (!call.add((*stack)[base + i], op.arguments[i])) return Recorded::kNo;
  }
  if (call.device < 0) return Recorded::kNo;
  // A process's part of what is gathered may lie in its place already.
  if (op.writes && !op.communicates && overlap(op, call.operands)) return Recorded::kNo;

  const auto inference =
      infer(call.words, op, handle, c10::ArrayRef<c10::IValue>(stack->data() + base, n_arguments));
  if (!inference->recordable) return Recorded::kNo;
  if (!inference->resizes.empty()) {
    for (const Inference::Resize& resize : inference->resizes) {
      if (is_also_read((*stack)[base + resize.argument].toTensor(), call.operands))
        return Recorded::kNo;
    }
    for (const Inference::Resize& resize : inference->resizes) {
      resize_result((*stack)[base + resize.argument].toTensor(), resize.sizes, resize.strides);
    }
    // With its final geometry the call may be the one that the plan expects.
    return take_call(op, handle, stack, place);
  }
  refuse_absurd(inference->largest, call.device);
  for (const Operand& operand : call.operands) {
    // A CPU index may change before the step runs.
    if (operand.host) call.snapshots.push_back(operand.tensor->clone());
  }
  uint32_t source = 0;
  if (locator.of_operator != nullptr) {
    source = locator.of_operator(op, is_differentiable(op, *stack));
  }

  const auto locked = lock();
  if (locked.was_interrupted()) return Recorded::kInterrupted;
  if (suspended()) return Recorded::kSuspended;
  if (expected_ != nullptr) stop_following();
  const Mark before = mark();
  try {
    append(op, call, *inference, source);
    push_results(op, graph_.words.data() + graph_.nodes.back().outputs, stack);
  } catch (...) {
    go_back(before);
    throw;
  }
  note_place(place);
  count(Counter::Nodes);
  return Recorded::kYes;
}

// The call becomes the last node of the graph.
void Recorder::append(const graph::Op& op, Call& call, const Inference& inference,
                      uint32_t source) {
  graph::Node node;
  node.op = &op;
  node.ambient = call.ambient;
  node.source = source;
  node.origin = static_cast<uint32_t>(graph_.nodes.size());
  node.words = static_cast<uint32_t>(graph_.words.size());
  node.values = static_cast<uint32_t>(values_.size());
  node.n_values = static_cast<uint32_t>(call.values.size());
  size_t snapshot = 0;
  for (const Operand& operand : call.operands) {
    int64_t* word = call.words.data() + operand.word;
    word[1] = operand.host ? add_host_entry(call.snapshots[snapshot++])
                           : entry_of(*operand.tensor, operand.writes, word + 2);
  }
  graph_.words.insert(graph_.words.end(), call.words.begin() + Call::kPrefix, call.words.end());
  values_.insert(values_.end(), call.values.begin(), call.values.end());
  node.outputs = static_cast<uint32_t>(graph_.words.size());
  graph_.words.insert(graph_.words.end(), inference.results.begin(), inference.results.end());
  node.end = static_cast<uint32_t>(graph_.words.size());
  // Fresh results are numbered after all operands, in order.
  uint32_t next_buffer = static_cast<uint32_t>(entries_.size());
  for (uint32_t at = node.outputs; at < node.end;) {
    int64_t* word = graph_.words.data() + at;
    if (graph::tag_of(*word) == Tag::kList) {
      ++at;  // its items follow
      continue;
    }
    if (graph::tag_of(*word) == Tag::kTensor) word[1] = next_buffer++;
    at += graph::item_words(word);
  }
  graph_.nodes.push_back(node);
  ++n_nodes_;
  if (op.communicates) communicates_ = true;
}

Recorder::Mark Recorder::mark() const {
  return {n_nodes_, graph_.nodes.size(), graph_.words.size(), values_.size(), entries_.size()};
}

void Recorder::go_back(const Mark& mark) {
  drop_entries(mark.entries);
  values_.resize(mark.values);
  graph_.words.resize(mark.words);
  graph_.nodes.resize(mark.recorded);
  n_nodes_ = mark.nodes;
}

uint32_t Recorder::add_entry(LazyStorage* storage, int64_t byte_offset) {
  check_contents(*storage);
  const auto index = static_cast<uint32_t>(entries_.size());
  Entry& entry = entries_.emplace_back();
  if (index < before_.size() && before_[index].storage._unsafe_get_target() == storage) {
    entry.storage = std::move(before_[index].storage);
  } else {
    c10::raw::weak_intrusive_ptr::incref(storage);
    entry.storage = c10::weak_intrusive_ptr<LazyStorage>::reclaim(storage);
  }
  entry.group = index;
  if (storage->has_memory()) {
    entry.kind = graph::BufferKind::kInput;
    entry.memory = storage->memory();
    entry.byte_offset = byte_offset;
  } else {
    entry.nbytes = storage->nbytes();
  }
  return index;
}

uint32_t Recorder::add_host_entry(const at::Tensor& tensor) {
  const auto index = static_cast<uint32_t>(entries_.size());
  Entry& entry = entries_.emplace_back();
  entry.kind = graph::BufferKind::kHost;
  entry.memory = tensor.storage();
  entry.group = index;
  return index;
}

uint32_t Recorder::entry_of(const at::TensorBase& tensor, bool writes, int64_t* offset) {
  LazyStorage* storage = storage_of(tensor);
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const int64_t elements = impl->storage_offset();
  const auto bytes = elements * static_cast<int64_t>(impl->dtype().itemsize());
  if (storage->trace != number_) {
    const uint32_t index = add_entry(storage, bytes);
    storage->trace = number_;
    storage->entry = index;
    entries_[index].written = writes;
    *offset = entries_[index].kind == graph::BufferKind::kInput ? 0 : elements;
    return index;
  }
  const uint32_t first = storage->entry;
  entries_[first].written |= writes;
  if (entries_[first].kind != graph::BufferKind::kInput) {
    *offset = elements;
    return first;
  }
  *offset = 0;
  uint32_t at = first;
  while (entries_[at].byte_offset != bytes) {
    if (entries_[at].next == 0) {
      const uint32_t index = add_entry(storage, bytes);
      entries_[index].group = first;
      entries_[at].next = index;
      return index;
    }
    at = entries_[at].next;
  }
  return at;
}

void Recorder::drop_entries(size_t first) {
  // The last first: each is then the end of its chain.
  for (size_t i = entries_.size(); i-- > first;) {
    const Entry& entry = entries_[i];
    if (entry.group == i) {
      // The entry knows the storage weakly, so even one that has died is there to be written.
      if (LazyStorage* storage = entry.storage._unsafe_get_target()) storage->trace = 0;
    } else {
      for (uint32_t at = entry.group;; at = entries_[at].next) {
        if (entries_[at].next == i) {
          entries_[at].next = 0;
          break;
        }
      }
    }
  }
  entries_.resize(first);
}

void Recorder::push_results(const graph::Op& op, const int64_t* word, torch::jit::Stack* stack) {
  const auto fresh = [&]() -> at::Tensor {
    if (graph::tag_of(*word) == Tag::kUndefined) {
      ++word;
      return {};
    }
    const graph::TensorWords tensor = graph::read_tensor(word);
    word += graph::item_words(word);
    const size_t nbytes = result_bytes(tensor);
    auto storage = make_storage(nbytes, device_);
    storage->trace = number_;
    storage->entry = static_cast<uint32_t>(entries_.size());
    Entry& entry = entries_.emplace_back();
    entry.storage = c10::weak_intrusive_ptr<LazyStorage>(storage);
    entry.nbytes = nbytes;
    entry.written = true;
    entry.group = storage->entry;
    return make_tensor(std::move(storage), static_cast<c10::ScalarType>(tensor.dtype),
                       {tensor.sizes.data(), tensor.sizes.size()},
                       {tensor.strides.data(), tensor.strides.size()});
  };
  const size_t base = stack->size() - op.arguments.size();
  c10::SmallVector<c10::IValue, 4> results;
  for (const graph::Return& result : op.returns) {
    if (result.alias >= 0) {
      results.push_back((*stack)[base + static_cast<size_t>(result.alias)]);
    } else if (result.list) {
      c10::List<at::Tensor> list;
      const uint32_t items = graph::count_of(*word++);
      list.reserve(items);
      for (uint32_t i = 0; i < items; ++i) list.push_back(fresh());
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(fresh());
    }
  }
  stack->reserve(base + results.size());  // from here on nothing can fail
  torch::jit::drop(*stack, op.arguments.size());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

// ---- the trace as a whole ----------------------------------------------------------------------

void Recorder::detach(LazyStorage& storage, size_t nbytes) {
  ACC_CHECK(!suspended(), "[acc] a storage of work that waits was given up. Report this.");
  if (knows(storage)) {
    for (uint32_t at = storage.entry;;) {
      Entry& entry = entries_[at];
      entry.storage.reset();
      if (entry.next == 0) break;
      at = entry.next;
    }
    storage.trace = 0;
  }
  storage.take_memory(nbytes);
}

Trace Recorder::take() {
  Trace trace;
  trace.number = number_;
  if (expected_ != nullptr && n_nodes_ == expected_->nodes.size() && n_nodes_ > 0) {
    trace.followed = expected_;
  } else if (expected_ != nullptr) {
    stop_following();
  }
  trace.entries = std::move(entries_);
  trace.values = std::move(values_);
  trace.places = std::exchange(places_, {});
  if (trace.followed == nullptr) {
    trace.graph = std::move(graph_);
    trace.graph.buffers.reserve(trace.entries.size());
    for (const Entry& entry : trace.entries) {
      const Entry& first = trace.entries[entry.group];
      graph::Buffer& buffer = trace.graph.buffers.emplace_back();
      buffer.kind = entry.kind;
      buffer.nbytes = entry.nbytes;
      buffer.group = entry.group;
      buffer.written = first.written;
      // Where the views of a storage that is only read begin is an address, not structure.
      buffer.group_offset = first.written ? entry.byte_offset - first.byte_offset : 0;
    }
  }
  graph_.clear();
  n_nodes_ = 0;
  communicates_ = false;
  expected_ = nullptr;
  following_ = false;
  begin(next_trace++);
  return trace;
}

void Recorder::suspend(const Trace& trace, bool communicates) {
  ACC_CHECK(n_nodes_ == 0 && entries_.empty());
  begin(trace.number);
  communicates_ = communicates;
  suspended_ = true;
}

void Recorder::unsuspend() {
  begin(next_trace++);
  communicates_ = false;
  suspended_ = false;
}

void Recorder::recycle(Trace&& trace) {
  if (!entries_.empty() || !values_.empty()) return;
  values_ = std::move(trace.values);
  values_.clear();
  for (Entry& entry : trace.entries) {
    entry.memory = c10::Storage();
    if (entry.kind != graph::BufferKind::kInput) entry.storage.reset();
  }
  entries_ = std::exchange(before_, std::move(trace.entries));
  entries_.clear();
}

}  // namespace acc::record
