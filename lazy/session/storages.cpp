#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/event.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/on_device.h"
#include "lazy/exec/runner.h"
#include "lazy/record/numbers.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"
#include "lazy/record/watch.h"
#include "lazy/session/reasons.h"
#include "lazy/session/session_impl.h"

// What is done to a storage between two operators that are recorded.
namespace acc::session {

using record::FlushReason;
using record::LazyStorage;
using record::Recorder;

std::shared_ptr<const record::Poison> poison_of(const at::Tensor& tensor) {
  const auto lock = record::recorder(tensor.device().index()).lock();
  return record::storage_of(tensor)->poison;
}

std::shared_ptr<const record::Poison> cure(const at::Tensor& tensor) {
  LazyStorage& storage = *record::storage_of(tensor);
  const auto lock = record::recorder(tensor.device().index()).lock();
  const bool whole = tensor.is_non_overlapping_and_dense() && tensor.nbytes() == storage.nbytes();
  return whole ? std::exchange(storage.poison, nullptr) : nullptr;
}

void poison_again(const at::Tensor& tensor, std::shared_ptr<const record::Poison> poison) {
  const auto lock = record::recorder(tensor.device().index()).lock();
  record::storage_of(tensor)->poison = std::move(poison);
}

static void materialise(LazyStorage& storage, c10::Stream stream) {
  record::check_contents(storage);
  if (storage.has_memory()) return;
  storage.set_memory(allocate(storage.nbytes(), stream));
}

void materialise(LazyStorage& storage) {
  materialise(storage, runtime::backend().default_stream(storage.device().index()));
}

// A tensor of the backend's that lies in `memory` as `tensor` does in its storage.
static at::Tensor over(c10::Storage memory, const at::Tensor& tensor) {
  const auto key = memory.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor result = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(memory), c10::DispatchKeySet(key), tensor.dtype());
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  record::copy_flags(tensor, result);
  return result;
}

std::optional<at::Tensor> new_memory(const at::Tensor& tensor, c10::Stream stream) {
  runtime::note_use();
  LazyStorage& storage = *record::storage_of(tensor);
  Recorder& recorder = record::recorder(tensor.device().index());
  const auto lock = recorder.lock();
  if (recorder.knows(storage) || storage.has_memory() || storage.poison != nullptr) {
    return std::nullopt;
  }
  materialise(storage, stream);
  // Now, since nothing is captured while the lock is held: torch's allocator takes it that what it
  // hears of during a capture is captured itself, and forgets it when the memory is freed.
  const c10::Stream work = runtime::backend().default_stream(storage.device().index());
  if (stream != work) runtime::backend().record_stream(storage.memory().data_ptr(), work);
  return over(storage.memory(), tensor);
}

at::Tensor share(const at::Tensor& tensor) {
  at::Tensor result = alias(tensor, FlushReason::kPointer);
  const auto lock = record::recorder(tensor.device().index()).lock();
  record::storage_of(tensor)->observed = true;
  return result;
}

bool Session::waits_to_write(Recorder& recorder, const LazyStorage& storage) {
  const auto& suspended = devices_[static_cast<size_t>(recorder.device())].suspended;
  if (suspended == nullptr) return false;
  const plan::Plan& plan = *suspended->work.runs;
  const plan::Schedule& schedule = exec::schedule(*suspended->run);
  for (size_t step = exec::next_step(*suspended->run); step < schedule.steps.size(); ++step) {
    for (const graph::Use& use : plan::uses(plan, schedule.steps[step])) {
      const auto& entries = suspended->work.trace.entries;
      const uint32_t first = plan.program.buffers[use.buffer].group;
      if (!use.writes || first >= entries.size()) continue;  // the plan's own have no entry
      if (entries[first].storage._unsafe_get_target() == &storage) return true;
    }
  }
  return false;
}

at::Tensor alias(const at::Tensor& tensor, FlushReason reason) {
  runtime::note_use();
  LazyStorage& storage = *record::storage_of(tensor);
  Recorder& recorder = record::recorder(tensor.device().index());
  c10::Storage memory;
  bool reads = true;  // contents, rather than makes room for them
  bool told = false;  // the user, that memory ran out
  {
    const auto lock = recorder.lock();
    told = Session::get().was_told(recorder);
    if (!recorder.knows(storage)) {
      reads = storage.has_memory();
      materialise(storage);
      memory = storage.memory();
    }
  }
  if (reads && record::watching()) record::note_cut(reason, tensor.device().index());
  if (!memory) {
    try {
      flush(tensor.device().index(), reason);
    } catch (const c10::OutOfMemoryError&) {
      // What is only read, and complete, can be read all the same, by who was told before.
      const auto lock = recorder.lock();
      if (!told || reason != FlushReason::kRead || !recorder.suspended() || !storage.has_memory() ||
          Session::get().waits_to_write(recorder, storage)) {
        throw;
      }
    }
    const auto lock = recorder.lock();
    // Another thread may record while `stop` submits for the last time.
    ACC_CHECK(!has_ended() || !recorder.knows(storage),
              "[acc] what was recorded on this tensor is not done: the process ends. Join the "
              "thread that computes it before the program ends.");
    materialise(storage);
    memory = storage.memory();
  }
  if (reason == FlushReason::kPointer) {
    const c10::DeviceIndex device = tensor.device().index();
    runtime::open_current_stream(device);  // or nobody is told
    const auto lock = recorder.lock();
    storage.pinned = true;
    std::vector<c10::Stream> streams = std::exchange(storage.streams, {});
    streams.push_back(runtime::backend().current_stream(device));
    for (const c10::Stream stream : streams) {
      runtime::let_use(stream, memory, tensor.storage());
    }
    runtime::let_current_stream_follow(device);
  } else {
    runtime::follow_own_streams(tensor.device().index());
  }
  return over(std::move(memory), tensor);
}

at::Tensor await(const at::Tensor& tensor) {
  const bool submitted = [&] {
    Recorder& recorder = record::recorder(tensor.device().index());
    const auto lock = recorder.lock();
    LazyStorage& storage = *record::storage_of(tensor);
    return !recorder.knows(storage) && storage.has_memory();
  }();
  if (submitted) count_wait();
  return alias(tensor, FlushReason::kRead);
}

void resize_storage(LazyStorage& storage, size_t nbytes) {
  const size_t old_bytes = storage.nbytes();
  if (nbytes == old_bytes) return;
  const c10::DeviceIndex device = storage.device().index();
  record::refuse_absurd(nbytes, device);
  Recorder& recorder = record::recorder(device);
  if (record::watching() && old_bytes > 0) {
    bool contents = false;
    {
      const auto lock = recorder.lock();
      contents = recorder.knows(storage) || storage.has_memory();
    }
    if (contents) record::note_cut(FlushReason::kResize, device);
  }
  for (;;) {
    const bool goes_on = !recorder.suspended() || settle(device);
    const auto lock = recorder.lock();
    if (goes_on && recorder.suspended()) continue;  // by the thread that submits what is idle
    const bool without_contents = !recorder.knows(storage) && !storage.has_memory();
    if (nbytes > 0 && old_bytes > 0 && !without_contents) break;
    if (goes_on) {
      recorder.detach(storage, nbytes);
    } else {
      storage.take_memory(nbytes);
    }
    storage.poison.reset();
    return;
  }
  flush(device, FlushReason::kResize);
  runtime::follow_own_streams(device);
  const auto lock = recorder.lock();
  materialise(storage);
  // First the new memory, which may not be had.
  c10::Storage memory = allocate(nbytes, runtime::backend().default_stream(device));
  const runtime::OnDevice on_device(device);
  const c10::Storage old = storage.take_memory(nbytes);
  storage.set_memory(std::move(memory));
  runtime::backend().copy(storage.memory().mutable_data(), old.data(), std::min(old_bytes, nbytes),
                          device);
}

}  // namespace acc::session
