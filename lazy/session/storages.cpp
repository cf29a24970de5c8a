#include <algorithm>
#include <memory>
#include <utility>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/on_device.h"
#include "lazy/exec/runner.h"
#include "lazy/record/numbers.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"
#include "lazy/record/watch.h"
#include "lazy/session/session.h"

// What is done to a storage between two operators that are recorded.
namespace acc::session {

using record::FlushReason;
using record::LazyStorage;
using record::Recorder;

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
  const auto lock = recorder.lock();
  materialise(storage);
  const runtime::OnDevice on_device(device);
  // First the new memory, which may not be had.
  c10::Storage memory = exec::allocate(nbytes);
  const c10::Storage old = storage.take_memory(nbytes);
  storage.set_memory(std::move(memory));
  runtime::backend().copy(storage.memory().mutable_data(), old.data(), std::min(old_bytes, nbytes),
                          device);
}

}  // namespace acc::session
