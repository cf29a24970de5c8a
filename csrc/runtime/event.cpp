#include "csrc/runtime/event.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/hooks_table.h"
#include "csrc/runtime/on_device.h"

namespace acc::runtime {
namespace {

constexpr size_t kDevices = size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1;

// The events of one device that wait for recorded work to be submitted.
struct Waiting {
  std::mutex mutex;
  std::vector<Event*> events;
  std::atomic<size_t> count{0};  // of `events`: flushes look here first
};

Waiting& waiting_of(c10::DeviceIndex device) {
  // Never destroyed: events may outlive static destructors.
  static auto& devices = *new std::array<Waiting, kDevices>;
  return devices.at(static_cast<size_t>(device));
}

// The program's own streams on one device, each with the storages whose address it was given.
struct ToldStreams {
  std::mutex mutex;
  using Storages = std::map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;
  std::map<c10::StreamId, Storages> storages;
  std::atomic<bool> any{false};  // who submits work looks here first
};

ToldStreams& told_streams_of(c10::DeviceIndex device) {
  // Never destroyed: storages outlive static destructors.
  static auto& devices = *new std::array<ToldStreams, kDevices>;
  return devices.at(static_cast<size_t>(device));
}

void remove(Waiting& waiting, const Event* event) {
  const auto found = std::find(waiting.events.begin(), waiting.events.end(), event);
  if (found != waiting.events.end()) waiting.events.erase(found);
  waiting.count.store(waiting.events.size(), std::memory_order_release);
}

}  // namespace

Event::~Event() {
  if (device_ < 0) return;
  if (in_bad_fork()) {
    // A thread of the parent may have held the mutex, and CUDA events cannot be destroyed here.
    (void)recorded_.release();
    (void)direct_.release();
    return;
  }
  Waiting& waiting = waiting_of(device_);
  const std::lock_guard lock(waiting.mutex);
  if (waiting_) remove(waiting, this);
}

void Event::record(c10::Stream stream) {
  note_use();
  const c10::DeviceIndex device = stream.device_index();
  ACC_CHECK(device_ < 0 || device_ == device,
            "[torch.acc.Event] this event belongs to acc:", static_cast<int>(device_),
            " and cannot be recorded on a stream of acc:", static_cast<int>(device),
            ". Make an event for each device.");
  Waiting& waiting = waiting_of(device);
  const std::lock_guard lock(waiting.mutex);
  // Asked under the lock: who submits the work meanwhile waits to look for this event.
  const bool later = pending(device);
  device_ = device;
  // Streams that wait for an earlier record, not submitted yet, wait for this one: it is behind it.
  if (stream != backend().default_stream(device)) {
    direct_ = backend().mark(stream, timing_, std::move(direct_));
  } else {
    direct_.reset();
  }
  if (!later) {
    if (waiting_) remove(waiting, this);
    set_marker();
  } else if (!waiting_) {
    waiting.events.push_back(this);
    waiting.count.store(waiting.events.size(), std::memory_order_release);
    waiting_ = true;
  }
}

void Event::set_marker() {
  waiting_ = false;
  recorded_ = backend().mark(backend().default_stream(device_), timing_, std::move(recorded_));
  for (const c10::Stream stream : blocked_) backend().block(*recorded_, stream);
  blocked_.clear();
}

void Event::settle() {
  note_use();
  Waiting& waiting = waiting_of(device_);
  {
    const std::lock_guard lock(waiting.mutex);
    if (!waiting_) return;
  }
  flush(device_, Cause::kEvent);
  const std::lock_guard lock(waiting.mutex);
  if (!waiting_) return;
  // The work in question was submitted by somebody else, or was given up.
  remove(waiting, this);
  set_marker();
}

void Event::block(c10::Stream stream) {
  note_use();
  if (device_ < 0) return;
  // Another device may submit what it records from now on before this one does.
  if (stream.device_index() != device_) settle();
  Waiting& waiting = waiting_of(device_);
  const std::lock_guard lock(waiting.mutex);
  if (waiting_ && !pending(device_)) {
    // Who submitted the work had looked for events just before this one was recorded.
    remove(waiting, this);
    set_marker();
  }
  block_stream(stream);
  // What is recorded under `stream` will run on the default stream of its device.
  const c10::Stream in_order = backend().default_stream(stream.device_index());
  if (in_order != stream) block_stream(in_order);
}

void Event::block_stream(c10::Stream stream) {
  if (direct_ != nullptr) backend().block(*direct_, stream);
  if (stream == backend().default_stream(device_)) return;  // in program order anyway
  if (waiting_) {
    blocked_.push_back(stream);
  } else {
    backend().block(*recorded_, stream);
  }
}

bool Event::query() {
  if (device_ < 0) return true;
  settle();
  return await_device(device_, [&] {
    return backend().passed(*recorded_) && (direct_ == nullptr || backend().passed(*direct_));
  });
}

void Event::synchronize() {
  if (device_ < 0) return;
  note_wait(device_);
  settle();
  const GilRelease release;
  await_device(device_, [&] {
    backend().wait(*recorded_);
    if (direct_ != nullptr) backend().wait(*direct_);
  });
}

double Event::elapsed_ms(Event& later) {
  settle();
  later.settle();
  return await_device(device_, [&] { return backend().elapsed_ms(*recorded_, *later.recorded_); });
}

void events_submitted(c10::DeviceIndex device) {
  Waiting& waiting = waiting_of(device);
  if (waiting.count.load(std::memory_order_acquire) == 0) return;
  const std::lock_guard lock(waiting.mutex);
  for (Event* event : waiting.events) event->set_marker();
  waiting.events.clear();
  waiting.count.store(0, std::memory_order_release);
}

void let_use(c10::Stream stream, const c10::Storage& memory, const c10::Storage& storage) {
  if (stream == backend().default_stream(stream.device_index())) return;
  backend().record_stream(memory.data_ptr(), stream);
  ToldStreams& told = told_streams_of(stream.device_index());
  const std::lock_guard lock(told.mutex);
  told.storages[stream.id()].try_emplace(storage.unsafeGetStorageImpl(),
                                         storage.getWeakStorageImpl());
  told.any.store(true, std::memory_order_release);
}

void follow_own_streams(c10::DeviceIndex device) {
  ToldStreams& told = told_streams_of(device);
  if (!told.any.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(told.mutex);
  const c10::Stream work = backend().default_stream(device);
  for (auto each = told.storages.begin(); each != told.storages.end();) {
    auto& [id, storages] = *each;
    const c10::Stream own(c10::Stream::UNSAFE, work.device(), id);
    if (backend().captured_by_program(own)) {
      ++each;
      continue;
    }
    // Before the wait: what was submitted while the last one lived is waited for.
    std::erase_if(storages, [](const auto& storage) { return storage.second.expired(); });
    const bool is_last = storages.empty();
    let_follow(own, work);
    base::count_keyed("stream_waits", "own");
    each = is_last ? told.storages.erase(each) : std::next(each);
  }
  told.any.store(!told.storages.empty(), std::memory_order_release);
}

}  // namespace acc::runtime
