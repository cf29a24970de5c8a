#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

// The one interface to the hardware below the acc device. There are two: the host
// (backend_host.cpp) and CUDA (backend_cuda.cpp; no_cuda.cpp stands in for it in builds without).
//
// A backend knows nothing of pending work: who calls it has submitted what has to be done first.
// Devices are indices; streams are c10::Streams of the acc device.
namespace acc::runtime {

struct DeviceProperties {
  std::string name;
  size_t total_memory = 0;  // bytes
  int major = 0;            // compute capability; 0.0 on the host
  int minor = 0;
  int multiprocessors = 0;  // cores on the host
};

// A point in a stream, for events.
class Marker {
 public:
  virtual ~Marker() = default;
};

// Blocks of memory that captured work writes to each time it is submitted. From Backend::open_pool
// until `close`, what this thread allocates on the device comes from there. Blocks that are given
// back are handed out again to whoever has the pool open, and to nobody else, while one of these
// lives.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual void close() = 0;
};

// Work that is submitted again and again, each time with the memory and the numbers it was
// captured with.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  // In order with everything that was submitted to its device.
  virtual void submit() = 0;
  // After `submit` has thrown: whether it may have done something, so that it must not be called
  // again for the same submission.
  virtual bool begun() const noexcept = 0;
  // After a call of it has thrown: whether the calls before are done and the rest can be. On a GPU
  // none throws by itself, and none allocates.
  virtual bool may_go_on() const noexcept { return false; }
  // Makes the call that has thrown, and those behind it.
  virtual void go_on() {}
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;  // "host" or "cuda"
  // The device type of the tensors that share an acc tensor's memory: CPU or CUDA.
  virtual c10::DeviceType alias_type() const noexcept = 0;

  // Never throws; 0 when something is wrong. Makes no CUDA context.
  virtual c10::DeviceIndex device_count() const noexcept = 0;
  // The current device belongs to the calling thread.
  virtual c10::DeviceIndex current_device() const = 0;
  virtual c10::DeviceIndex exchange_device(c10::DeviceIndex device) = 0;
  virtual void unchecked_set_device(c10::DeviceIndex device) noexcept = 0;
  virtual bool has_context(c10::DeviceIndex device) const = 0;
  virtual DeviceProperties properties(c10::DeviceIndex device) = 0;
  // The device that owns a piece of memory; the current one where it cannot be told.
  virtual c10::DeviceIndex device_of(void* address) = 0;

  // Memory of the alias type on the current device.
  virtual c10::Allocator* allocator() = 0;
  // Copies within a device, in order with everything that was submitted to it.
  virtual void copy(void* to, const void* from, size_t nbytes, c10::DeviceIndex device) = 0;
  // Copies from this process's memory, which may change as soon as this returns, in order with
  // everything that was submitted to the device. It is no part of work that is being captured, but
  // comes before its first submission.
  virtual void upload(void* to, const void* from, size_t nbytes, c10::DeviceIndex device) = 0;
  virtual c10::CachingDeviceAllocator::DeviceStats memory_stats(c10::DeviceIndex device) = 0;
  // The bytes that pools of captured work have now.
  virtual uint64_t captured_bytes(c10::DeviceIndex device) = 0;
  // About how much of the host's memory captured work takes for each of its calls, beside what
  // made the call.
  virtual uint64_t host_bytes_per_call() const noexcept = 0;
  virtual void reset_peak_memory(c10::DeviceIndex device) = 0;
  virtual void reset_accumulated_memory(c10::DeviceIndex device) = 0;
  // Free and total bytes.
  virtual std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) = 0;
  virtual void empty_cache() = 0;
  // Memory must not be reused before `stream` has passed this point.
  virtual void record_stream(const c10::DataPtr& memory, c10::Stream stream) = 0;

  // Host memory that the device reads without a copy in between.
  virtual at::HostAllocator& host_allocator() = 0;
  virtual bool is_pinned(const void* address) = 0;

  // Waits until the device has done all that was submitted to it.
  virtual void synchronize(c10::DeviceIndex device) = 0;
  virtual c10::Stream default_stream(c10::DeviceIndex device) = 0;
  // What copies from the host are done on: beside the device's other work, so that they wait for
  // none of it. On the host, the default stream.
  virtual c10::Stream copy_stream(c10::DeviceIndex device) = 0;
  virtual c10::Stream current_stream(c10::DeviceIndex device) = 0;
  // A lower number is a higher priority; 0 is normal.
  virtual c10::Stream new_stream(c10::DeviceIndex device, int priority) = 0;
  // Makes `stream` current on its device and returns the one that was.
  virtual c10::Stream exchange_stream(c10::Stream stream) = 0;
  virtual bool query_stream(c10::Stream stream) = 0;
  virtual void synchronize_stream(c10::Stream stream) = 0;
  virtual void* native_stream(c10::Stream stream) = 0;
  // Whether the program captures a graph of its own there: what is in it then is no work yet, and
  // a stream that waits for it is a part of that graph.
  virtual bool captured_by_program(c10::Stream stream) = 0;

  // Marks the end of what is in `stream` now. Takes `reuse` over when it is not null.
  virtual std::unique_ptr<Marker> mark(c10::Stream stream, bool timing,
                                       std::unique_ptr<Marker> reuse) = 0;
  virtual bool passed(const Marker& marker) = 0;
  virtual void wait(const Marker& marker) = 0;
  // `stream` goes on only after the marker was passed.
  virtual void block(const Marker& marker, c10::Stream stream) = 0;
  virtual double elapsed_ms(const Marker& from, const Marker& to) = 0;

  // Whether work can be captured at all.
  virtual bool can_capture(c10::DeviceIndex device) = 0;
  virtual std::unique_ptr<Pool> open_pool(c10::DeviceIndex device) = 0;
  // What this thread submits to the device from here on is captured. On a GPU its streams know what
  // that is, and the work begins at end_capture. On the host it is done at once, as always, and
  // what a later submission has to do is told by `note`.
  virtual void begin_capture(c10::DeviceIndex device) = 0;
  virtual void note(std::function<void()> work) = 0;
  // Throws where what was submitted last has made the capture invalid and did not say so.
  virtual void check_capture(c10::DeviceIndex device) = 0;
  // The work has now been submitted once.
  virtual std::unique_ptr<CapturedWork> end_capture(c10::DeviceIndex device) = 0;
  // Something could not be captured, if only the begin or the end. Returns whether what was
  // submitted before it is done (host), rather than forgotten (CUDA).
  virtual bool abandon_capture(c10::DeviceIndex device) noexcept = 0;
};

// The backend of this process. The first call chooses by ACC_EXECUTOR and keeps the choice; it
// throws for ACC_EXECUTOR=cuda without a usable GPU, and then again at each call.
Backend& backend();

// Has `then` called when it is chosen, before any other thread has it; now, if that was before. For
// what depends on it and would be set up at import, which must not ask for GPUs: to ask is to start
// their driver, and that does not survive a fork.
void when_chosen(void (*then)());

// Whether that is the host's.
inline bool on_host() { return backend().alias_type() == c10::kCPU; }

// Null when nothing was chosen yet.
Backend* chosen_backend() noexcept;

Backend& host_backend();
// For tests: each upload of the host's takes so many microseconds more.
void slow_uploads(int64_t microseconds);
// Null in a build without CUDA.
Backend* cuda_backend();

// Throws unless `device` is the index of a device.
void check_device(c10::DeviceIndex device);

// Submits what is pending and waits for it; negative: the current device.
void synchronize(c10::DeviceIndex device);

inline c10::Device acc_device(c10::DeviceIndex index) {
  return {c10::DeviceType::PrivateUse1, index};
}

inline bool on_acc(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

}  // namespace acc::runtime
