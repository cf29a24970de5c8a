#include "lazy/capture/filling.h"

#include <algorithm>
#include <utility>

#include "csrc/base/check.h"
#include "lazy/session/session.h"

namespace acc::capture {

using record::LazyStorage;
using Kind = Binding::Kind;

void Filling::fill(record::Trace& trace) {
  for (const at::Tensor& tensor : arguments_) session::materialise(*record::storage_of(tensor));
  trace.entries.resize(graph_.buffers.size());
  // What is left behind comes last: it may take the place of what the step is given.
  for (const bool made : {false, true}) {
    for (uint32_t i = 0; i < graph_.buffers.size(); ++i) {
      const Kind kind = bindings_.buffers[i].kind;
      if ((kind == Kind::kMade || kind == Kind::kConstant) == made) fill_entry(i, trace);
    }
  }
  make_results(trace);
  // Nothing fails from here on.
  for (const Left& left : left_) {
    left.storage->poison.reset();
    left.storage->take_memory(bindings_.buffers[left.buffer].nbytes);
    if (left.constant) left.storage->set_memory(left.constant);
  }
  trace.values = values_;
  draws_.draw(trace.values);
}

void Filling::done() {
  for (const Left& left : left_) {
    if (!left.result || !left.storage->has_memory()) continue;
    left.result->set_memory(copy_of(left.storage->memory(), device_));
  }
}

void Filling::fill_entry(uint32_t i, record::Trace& trace) {
  const graph::Buffer& buffer = graph_.buffers[i];
  const Binding& binding = bindings_.buffers[i];
  record::Entry& entry = trace.entries[i];
  entry.kind = buffer.kind;
  entry.nbytes = buffer.nbytes;
  entry.group = buffer.group;
  entry.written = buffer.written;
  switch (binding.kind) {
    case Kind::kMade:
      return leave_behind(i, trace);
    case Kind::kConstant:
      return take_constant(i, trace);
    case Kind::kArgument: {
      const at::Tensor& tensor = arguments_[binding.argument];
      return take_contents(*record::storage_of(tensor), first_byte(tensor) + binding.byte_offset, i,
                           trace);
    }
    case Kind::kState: {
      const auto storage = binding.storage.lock();
      ACC_CHECK(storage, "[torchacc.capture] ", buffer_text(graph_, i),
                " is gone: its memory at capture was freed since. Keep the model, the optimizer "
                "and the gradients that the step uses as they are, or capture the step again. Put "
                "autocast into the function: what it keeps around a call goes with its block.");
      return take_contents(*storage, binding.byte_offset, i, trace);
    }
  }
}

void Filling::take_constant(uint32_t i, record::Trace& trace) {
  const Binding& binding = bindings_.buffers[i];
  record::Entry& entry = trace.entries[i];
  entry.byte_offset = binding.byte_offset;
  if (entry.group != i) {
    entry.memory = trace.entries[entry.group].memory;
    entry.storage = trace.entries[entry.group].storage;
    return;
  }
  leave_behind(i, trace);
  const bool left = !left_.empty() && left_.back().buffer == i;
  entry.memory = entry.written || left ? copy_of(binding.memory, device_) : binding.memory;
  if (left) left_.back().constant = entry.memory;
}

void Filling::take_contents(LazyStorage& storage, int64_t byte_offset, uint32_t i,
                            record::Trace& trace) const {
  record::check_contents(storage);
  record::Entry& entry = trace.entries[i];
  const int64_t end = byte_offset + bindings_.buffers[i].reach;
  ACC_CHECK(
      storage.has_memory() && byte_offset >= 0 && end <= static_cast<int64_t>(storage.nbytes()),
      "[torchacc.capture] ", buffer_text(graph_, i), " needs ", end,
      " bytes of its storage, which has ", storage.nbytes(), ". Capture the step again.");
  entry.storage = weak(&storage);
  entry.memory = storage.memory();
  entry.byte_offset = byte_offset;
  // At capture, one storage may have been that of an argument and of what the function knows.
  const bool first =
      entry.group == i || trace.entries[entry.group].storage._unsafe_get_target() != &storage;
  if (!first) return;
  if (storage.trace == trace.number) return check_no_write(storage, i);
  storage.trace = trace.number;
  storage.entry = i;
}

void Filling::leave_behind(uint32_t i, record::Trace& trace) {
  const Binding& binding = bindings_.buffers[i];
  auto storage = binding.storage.lock();  // null: nobody holds it any more
  if (!storage) return;
  ACC_CHECK(storage->nbytes() == binding.nbytes && !storage->observed, "[torchacc.capture] ",
            buffer_text(graph_, i),
            " was resized, or shared with another library, since capture. Capture the step "
            "again.");
  if (storage->trace != trace.number) {
    storage->trace = trace.number;
    storage->entry = i;
  } else if (bindings_.buffers[storage->entry].kind == Kind::kArgument) {
    check_no_write(*storage, i);
  }
  trace.entries[i].storage = weak(storage.get());
  left_.push_back({i, std::move(storage), nullptr, {}});
}

// Two buffers of the plan that were apart at capture are one storage now.
void Filling::check_no_write(const LazyStorage& storage, uint32_t i) const {
  const auto& buffers = graph_.buffers;
  const Kind kind = bindings_.buffers[i].kind;
  const bool made = kind == Kind::kMade || kind == Kind::kConstant;
  ACC_CHECK((made || !buffers[i].written) && !buffers[storage.entry].written, "[torchacc.capture] ",
            buffer_text(graph_, i), ", and ", buffer_text(graph_, storage.entry),
            ", share memory now and did not at capture, and the step writes it. Pass a copy "
            "(clone()), or capture the step with arguments that share memory.");
}

void Filling::make_results(record::Trace& trace) {
  for (size_t r = 0; r < bindings_.results.size(); ++r) {
    const Result& result = bindings_.results[r];
    if (result.kind == Kind::kArgument) {
      const at::Tensor& of = arguments_[result.index];
      const auto size = static_cast<int64_t>(c10::elementSize(result.geometry.dtype));
      auto storage = c10::intrusive_ptr<LazyStorage>::reclaim_copy(record::storage_of(of));
      results_.push_back(tensor_over(std::move(storage), result.geometry,
                                     (first_byte(of) + result.distance) / size));
      continue;
    }
    c10::intrusive_ptr<LazyStorage> storage;
    if (result.kind == Kind::kState) {
      storage = result.storage.lock();
      ACC_CHECK(storage, "[torchacc.capture] result ", r,
                " is a tensor that was there before the call, and that is gone. Capture the step "
                "again.");
    } else {
      storage = make_storage(result.index, trace);
    }
    results_.push_back(tensor_over(std::move(storage), result.geometry, result.geometry.offset));
  }
}

// Of a result; results that were views of each other still are.
c10::intrusive_ptr<LazyStorage> Filling::make_storage(uint32_t buffer, record::Trace& trace) {
  for (size_t r = 0; r < results_.size(); ++r) {
    const Result& other = bindings_.results[r];
    if (other.kind != Kind::kMade || other.index != buffer) continue;
    return c10::intrusive_ptr<LazyStorage>::reclaim_copy(record::storage_of(results_[r]));
  }
  auto storage = record::make_storage(graph_.buffers[buffer].nbytes, device_);
  for (Left& left : left_) {
    if (left.buffer != buffer) continue;
    left.result = storage;
    return storage;
  }
  trace.entries[buffer].storage = WeakStorage(storage);
  storage->trace = trace.number;
  storage->entry = buffer;
  return storage;
}

}  // namespace acc::capture
