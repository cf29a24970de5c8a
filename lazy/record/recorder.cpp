#include "lazy/record/recorder.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "lazy/graph/words.h"
#include "lazy/record/infer.h"
#include "lazy/record/numbers.h"
#include "lazy/record/watch.h"

namespace acc::record {
namespace {

using base::count;
using base::Counter;
using graph::Tag;

std::atomic<uint64_t> next_trace{1};
Locator locator;

bool on_acc(const c10::TensorImpl* impl) {
  return impl->key_set().has(c10::DispatchKey::PrivateUse1);
}

uint8_t lazy_bits(const c10::TensorImpl* impl) {
  return static_cast<uint8_t>((impl->is_conj() ? graph::kConjFlag : 0) |
                              (impl->is_neg() ? graph::kNegFlag : 0));
}

size_t result_bytes(const graph::TensorWords& tensor) {
  return at::detail::computeStorageNbytes(
      c10::IntArrayRef(tensor.sizes.data(), tensor.sizes.size()),
      c10::IntArrayRef(tensor.strides.data(), tensor.strides.size()),
      graph::element_bytes(tensor.dtype));
}

void check_takes_cpu(const graph::Op& op, const graph::Argument& argument,
                     c10::DeviceIndex device) {
  TORCH_CHECK(argument.cpu_ok,
              "Expected all tensors to be on the same device, but found at least two devices, acc:",
              static_cast<int>(device), " and cpu! (when checking argument '", argument.name,
              "' of ", op.name, "). Move it with .to(\"acc\") first.");
}

}  // namespace

void install_locator(const Locator& installed) { locator = installed; }

uint32_t source_here() { return locator.here != nullptr ? locator.here() : 0; }

c10::DeviceIndex device_of(const torch::jit::Stack& stack, size_t n) {
  for (size_t i = stack.size() - n; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      const at::Tensor& tensor = stack[i].toTensor();
      if (tensor.defined() && on_acc(tensor.unsafeGetTensorImpl())) return tensor.device().index();
    } else if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toListRef()) {
        if (!item.isTensor() || !item.toTensor().defined()) continue;
        const at::Tensor& tensor = item.toTensor();
        if (on_acc(tensor.unsafeGetTensorImpl())) return tensor.device().index();
      }
    }
  }
  return -1;
}

void check_devices(const graph::Op& op, const torch::jit::Stack& stack) {
  const size_t count = op.arguments.size();
  const c10::DeviceIndex device = device_of(stack, count);
  if (device < 0) return;
  for (size_t i = 0; i < count; ++i) {
    const graph::Argument& argument = op.arguments[i];
    const auto check = [&](const c10::IValue& value) {
      if (!value.isTensor() || !value.toTensor().defined()) return;
      const c10::TensorImpl* impl = value.toTensor().unsafeGetTensorImpl();
      if (impl->device_type() != c10::DeviceType::CPU) return;
      if (impl->dim() > 0 || argument.writes) check_takes_cpu(op, argument, device);
    };
    const c10::IValue& value = stack[stack.size() - count + i];
    if (!value.isList()) {
      check(value);
      continue;
    }
    for (const c10::IValue& item : value.toListRef()) check(item);
  }
}

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

namespace {

struct Operand {
  const at::Tensor* tensor;
  uint32_t word;  // position of its tag
  bool writes;
  bool host;
};

// ATen refuses in-place calls whose operands overlap in part or with themselves, and for all but
// pointwise operators those that write what they read. Its check needs real operands, so such a
// call runs at once; ATen then decides.
bool overlap(const graph::Op& op, std::span<const Operand> operands) {
  for (const Operand& written : operands) {
    if (!written.writes) continue;
    if (at::has_internal_overlap(written.tensor->unsafeGetTensorImpl()) == at::MemOverlap::Yes) {
      return true;
    }
    for (const Operand& other : operands) {
      if (&other == &written || !written.tensor->is_alias_of(*other.tensor)) continue;
      const auto status = at::get_overlap_status(written.tensor->unsafeGetTensorImpl(),
                                                 other.tensor->unsafeGetTensorImpl());
      if (status == at::MemOverlapStatus::Full && op.pointwise) continue;
      if (status != at::MemOverlapStatus::No) return true;
    }
  }
  return false;
}

bool overlap(const graph::Op& op, const torch::jit::Stack& stack) {
  c10::SmallVector<Operand, 8> operands;
  const size_t base = stack.size() - op.arguments.size();
  const auto add = [&](const c10::IValue& value, bool writes) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    if (!on_acc(value.toTensor().unsafeGetTensorImpl())) return;
    operands.push_back({&value.toTensor(), 0, writes, false});
  };
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const c10::IValue& value = stack[base + i];
    const bool writes = op.arguments[i].writes;
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) add(item, writes);
    } else {
      add(value, writes);
    }
  }
  return overlap(op, operands);
}

// Whether a tensor that is about to take another geometry shares its memory with another operand.
bool is_also_read(const at::Tensor& resized, std::span<const Operand> operands) {
  return std::ranges::any_of(operands, [&](const Operand& other) {
    return !other.writes && other.tensor->is_alias_of(resized);
  });
}

// Whether a number goes into the value block. `integers`: whether a tensor before it has some.
bool is_slot(const c10::IValue& value, const graph::Argument& argument, bool integers) {
  // A factor that nobody gave: passes may rely on it (accumulate.h).
  if (argument.scales && value.isInt() && value.toInt() == 1) return false;
  if (argument.role != graph::Role::kValue || !integers || !value.isInt()) {
    return argument.role != graph::Role::kStructure;
  }
  return std::in_range<int32_t>(value.toInt());
}

bool has_integers(const c10::TensorImpl* impl) {
  return c10::isIntegralType(c10::typeMetaToScalarType(impl->dtype()), /*includeBool=*/true);
}

}  // namespace

// One call in words, made outside the lock: its buffers are still unnumbered.
struct Recorder::Call {
  const graph::Op* op = nullptr;
  uint64_t ambient = 0;
  std::vector<int64_t> words;  // operator id and ambient word first: the memo's signature
  std::vector<int64_t> values;
  std::vector<Operand> operands;
  std::vector<at::Tensor> snapshots;
  c10::DeviceIndex device = -1;
  bool integers = false;  // a tensor has some

  static constexpr size_t kPrefix = 2;

  void begin(const graph::Op& operation, uint64_t ambient_word) {
    op = &operation;
    ambient = ambient_word;
    words.clear();
    values.clear();
    operands.clear();
    snapshots.clear();
    device = -1;
    integers = false;
    words.push_back(static_cast<int64_t>(operation.id));
    words.push_back(static_cast<int64_t>(ambient_word));
  }

  // False: the value has a type that only a direct call can pass on.
  bool add(const c10::IValue& value, const graph::Argument& argument) {
    if (value.isTensor()) return add_tensor(value.toTensor(), argument);
    if (value.isList()) return add_list(value.toListRef(), argument);
    return add_plain(value, is_slot(value, argument, integers));
  }

  bool add_tensor(const at::Tensor& tensor, const graph::Argument& argument) {
    if (!tensor.defined()) {
      words.push_back(graph::make_tag(Tag::kUndefined));
      return true;
    }
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const bool acc = on_acc(impl);
    if (!acc) {
      if (impl->device_type() != c10::DeviceType::CPU || impl->layout() != c10::kStrided) {
        return false;
      }
      if (impl->dim() == 0 && !argument.writes) return add_number(tensor);
      check_takes_cpu(*op, argument, device < 0 ? c10::DeviceIndex{0} : device);
    } else if (device < 0) {
      device = impl->device().index();
    } else {
      TORCH_CHECK(device == impl->device().index(),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "acc:",
                  static_cast<int>(device), " and acc:", static_cast<int>(impl->device().index()),
                  "! (when checking argument '", argument.name, "' of ", op->name,
                  "). Move it with .to(\"acc:", static_cast<int>(device), "\") first.");
    }
    // Somebody else reads and writes its memory, at any time.
    if (acc && storage_of(tensor)->observed) return false;
    const auto dims = static_cast<size_t>(impl->dim());
    integers |= has_integers(impl);
    operands.push_back({&tensor, static_cast<uint32_t>(words.size()), argument.writes, !acc});
    words.push_back(graph::make_tag(Tag::kTensor,
                                    static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype())),
                                    lazy_bits(impl), dims));
    words.push_back(0);
    words.push_back(0);
    const auto sizes = impl->sizes();
    const auto strides = impl->strides();
    words.insert(words.end(), sizes.begin(), sizes.end());
    words.insert(words.end(), strides.begin(), strides.end());
    return true;
  }

  bool add_number(const at::Tensor& tensor) {
    words.push_back(number_tag(tensor));
    append_number(tensor, &values);
    return true;
  }

  bool add_plain(const c10::IValue& value, bool slot) {
    const uint8_t flag = slot ? graph::kValueFlag : 0;
    std::vector<int64_t>& payload = slot ? values : words;
    if (value.isNone()) {
      words.push_back(graph::make_tag(Tag::kNone));
    } else if (value.isInt()) {
      words.push_back(graph::make_tag(Tag::kInt, 0, flag));
      payload.push_back(value.toInt());
    } else if (value.isDouble()) {
      words.push_back(graph::make_tag(Tag::kFloat, 0, flag));
      payload.push_back(to_bits(value.toDouble()));
    } else if (value.isBool()) {
      words.push_back(graph::make_tag(Tag::kBool, 0, flag));
      payload.push_back(value.toBool() ? 1 : 0);
    } else if (value.isComplexDouble()) {
      words.push_back(graph::make_tag(Tag::kComplex, 0, flag));
      payload.push_back(to_bits(value.toComplexDouble().real()));
      payload.push_back(to_bits(value.toComplexDouble().imag()));
    } else if (value.isDevice()) {
      words.push_back(graph::make_tag(Tag::kDevice));
    } else if (value.isString()) {
      const std::string_view text = value.toStringView();
      words.push_back(graph::make_tag(Tag::kString, 0, 0, text.size()));
      const size_t begin = words.size();
      words.resize(begin + (text.size() + 7) / 8, 0);
      std::memcpy(words.data() + begin, text.data(), text.size());
    } else {
      return false;
    }
    return true;
  }

  bool add_list(c10::ArrayRef<c10::IValue> items, const graph::Argument& argument) {
    words.push_back(graph::make_tag(Tag::kList, 0, 0, items.size()));
    for (const c10::IValue& item : items) {
      if (item.isTensor()) {
        if (!add_tensor(item.toTensor(), argument)) return false;
      } else if (!add_plain(item, is_slot(item, argument, integers))) {
        return false;
      }
    }
    return true;
  }
};

// The calls that a thread is recording. Kept, so that recording allocates nothing once the vectors
// have grown. There is more than one when a Meta kernel runs Python, and Python an operator: a
// finalizer, a signal handler.
class Recorder::CallLease {
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

Recorder::Recorder(c10::DeviceIndex device) : device_(device), number_(next_trace++) {}

// Whether this thread runs a plan, of whatever device.
static thread_local bool runs_plan = false;

runtime::LockWithoutGil Recorder::lock() {
  ACC_CHECK(
      !runs_plan,
      "[acc] a kernel uses tensors of acc while the step that called it runs. Compute with the "
      "tensors that the kernel was given, or call it outside of recorded operators.");
  return runtime::LockWithoutGil(mutex_);
}

void Recorder::begin_run() { running_ = runs_plan = true; }
void Recorder::end_run() { running_ = runs_plan = false; }

Recorded Recorder::record(const graph::Op& op, const c10::OperatorHandle& handle,
                          torch::jit::Stack* stack) {
  // Asked once per trace: a profiler that begins in the middle of one has to wait for the next.
  if (pending() == 0) profiled_ = locator.profiled != nullptr && locator.profiled();
  const bool profiled = profiled_.load(std::memory_order_relaxed);
  return take_call(op, handle, stack, profiled ? locator.here_profiled() : 0);
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
  const uint32_t source = source_here();

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
  c10::raw::weak_intrusive_ptr::incref(storage);
  entry.storage = c10::weak_intrusive_ptr<LazyStorage>::reclaim(storage);
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

// ---- following ---------------------------------------------------------------------------------

void Recorder::expect(const graph::Graph* graph) {
  if (n_nodes_ == 0 && entries_.empty()) expected_ = graph;
}

bool Recorder::follow_tensor(const at::Tensor& tensor, const int64_t* word) {
  if (!tensor.defined()) return graph::tag_of(*word) == Tag::kUndefined;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!on_acc(impl)) {
    if (graph::tag_of(*word) == Tag::kNumber && impl->device_type() == c10::DeviceType::CPU &&
        impl->dim() == 0 && number_tag(tensor) == *word) {
      append_number(tensor, &values_);
      return true;
    }
    return false;
  }
  const auto dims = static_cast<size_t>(impl->dim());
  if (*word != graph::make_tag(Tag::kTensor,
                               static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype())),
                               lazy_bits(impl), dims) ||
      impl->device().index() != device_ ||
      std::memcmp(impl->sizes().data(), word + 3, dims * sizeof(int64_t)) != 0 ||
      std::memcmp(impl->strides().data(), word + 3 + dims, dims * sizeof(int64_t)) != 0) {
    return false;
  }
  integers_ |= has_integers(impl);
  LazyStorage* storage = storage_of(tensor);
  if (storage->observed) return false;
  const auto expected = static_cast<uint32_t>(word[1]);
  if (storage->trace == number_ && entries_[storage->entry].kind != graph::BufferKind::kInput) {
    return storage->entry == expected && word[2] == impl->storage_offset();
  }
  const size_t known = entries_.size();
  int64_t offset = 0;
  // Whether it is written is known from the expected graph once the whole step was followed.
  const uint32_t entry = entry_of(tensor, false, &offset);
  if (entry != expected || offset != word[2]) return false;
  views_differ_ |= entries_[entry].group != entry || entries_[entry].next != 0;
  if (entries_.size() == known) return true;
  const graph::Buffer& buffer = expected_->buffers[expected];
  return buffer.kind == entries_[entry].kind && buffer.nbytes == entries_[entry].nbytes &&
         buffer.group == entries_[entry].group;
}

bool Recorder::follow_value(const c10::IValue& value, const graph::Argument& argument,
                            const int64_t*& word) {
  if (value.isTensor()) {
    if (!follow_tensor(value.toTensor(), word)) return false;
    word += graph::item_words(word);
    return true;
  }
  const auto scalar = [&](Tag tag, int64_t bits) {
    const bool slot = is_slot(value, argument, integers_);
    if (*word++ != graph::make_tag(tag, 0, slot ? graph::kValueFlag : 0)) return false;
    if (!slot) return *word++ == bits;
    values_.push_back(bits);
    return true;
  };
  if (value.isInt()) return scalar(Tag::kInt, value.toInt());
  if (value.isDouble()) return scalar(Tag::kFloat, to_bits(value.toDouble()));
  if (value.isBool()) return scalar(Tag::kBool, value.toBool() ? 1 : 0);
  if (value.isNone()) return *word++ == graph::make_tag(Tag::kNone);
  if (value.isDevice()) return *word++ == graph::make_tag(Tag::kDevice);
  if (value.isList()) {
    const auto items = value.toListRef();
    if (*word++ != graph::make_tag(Tag::kList, 0, 0, items.size())) return false;
    for (const c10::IValue& item : items) {
      if (!follow_value(item, argument, word)) return false;
    }
    return true;
  }
  if (value.isString()) {
    const std::string_view text = value.toStringView();
    if (*word != graph::make_tag(Tag::kString, 0, 0, text.size()) ||
        std::memcmp(word + 1, text.data(), text.size()) != 0) {
      return false;
    }
    word += graph::item_words(word);
    return true;
  }
  return false;  // complex numbers and what cannot be recorded take the slow way
}

// Compares the call with the next node of the expected step. On success the trace is one node
// longer; on failure it is unchanged.
bool Recorder::follow(const graph::Op& op, uint64_t ambient, torch::jit::Stack* stack) {
  if (n_nodes_ >= expected_->nodes.size()) return false;
  const graph::Node& node = expected_->nodes[n_nodes_];
  if (node.op != &op || node.ambient != ambient) return false;
  const Mark before = mark();
  const size_t base = stack->size() - op.arguments.size();
  const int64_t* word = expected_->words.data() + node.words;
  bool equal = true;
  views_differ_ = false;
  integers_ = false;
  try {
    for (size_t i = 0; equal && i < op.arguments.size(); ++i) {
      equal = follow_value((*stack)[base + i], op.arguments[i], word);
    }
    // Where views of one input begin is an address; whether they overlap is asked at each call.
    if (equal && op.writes && views_differ_ && !op.communicates) equal = !overlap(op, *stack);
    if (equal) {
      ++n_nodes_;
      if (op.communicates) communicates_ = true;
      push_results(op, expected_->words.data() + node.outputs, stack);
      count(Counter::NodesFollowed);
      return true;
    }
  } catch (...) {
    go_back(before);
    throw;
  }
  go_back(before);
  return false;
}

// The step is no longer the expected one: what was followed so far becomes a recorded prefix.
void Recorder::stop_following() {
  if (expected_ != nullptr && n_nodes_ > 0) {
    graph_.nodes.assign(expected_->nodes.begin(),
                        expected_->nodes.begin() + static_cast<int64_t>(n_nodes_));
    graph_.words.assign(expected_->words.begin(),
                        expected_->words.begin() + graph_.nodes.back().end);
    for (const graph::Node& node : graph_.nodes) {
      for (const graph::Use& use : graph::uses(graph_, node)) {
        if (use.writes) entries_[entries_[use.buffer].group].written = true;
      }
    }
  }
  expected_ = nullptr;
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
  forget_left_behind(device_);
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
  number_ = next_trace++;
  return trace;
}

void Recorder::suspend(const Trace& trace, bool communicates) {
  ACC_CHECK(n_nodes_ == 0 && entries_.empty());
  number_ = trace.number;
  communicates_ = communicates;
  suspended_ = true;
}

void Recorder::unsuspend() {
  number_ = next_trace++;
  communicates_ = false;
  suspended_ = false;
}

void Recorder::recycle(Trace&& trace) {
  if (!entries_.empty() || !values_.empty()) return;
  entries_ = std::move(trace.entries);
  values_ = std::move(trace.values);
  entries_.clear();
  values_.clear();
}

}  // namespace acc::record
