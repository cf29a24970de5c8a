#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/cuda_pools.h"
#include "csrc/runtime/cuda_warnings.h"
#include "csrc/runtime/cuda_workspaces.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/nvidia.h"

// NVIDIA GPUs, through what torch ships: its caching allocator, its streams and events. An acc
// stream is the CUDA stream with the same number, so that torch's pools serve both.
namespace acc::runtime {
namespace {

using c10::DeviceIndex;
using c10::Stream;
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

Stream to_acc(CUDAStream stream) {
  return Stream(Stream::UNSAFE, acc_device(stream.device_index()), stream.id());
}

CUDAStream to_cuda(Stream stream) {
  return CUDAStream(
      CUDAStream::UNCHECKED,
      Stream(Stream::UNSAFE, {c10::DeviceType::CUDA, stream.device_index()}, stream.id()));
}

struct CudaMarker final : Marker {
  explicit CudaMarker(bool timing) : event(timing ? cudaEventDefault : cudaEventDisableTiming) {}
  c10::cuda::CUDAEvent event;
};

c10::cuda::CUDAEvent& event_of(const Marker& marker) {
  // Waiting for an event is not a change of the marker, but CUDAEvent::block is not const.
  return const_cast<CudaMarker&>(static_cast<const CudaMarker&>(marker)).event;
}

// Held while work of a device is captured; shared by those who wait for the device as a whole,
// which CUDA forbids meanwhile, and takes amiss in the capture.
std::shared_mutex& capture_mutex(DeviceIndex device) {
  constexpr size_t kDevices = size_t{std::numeric_limits<DeviceIndex>::max()} + 1;
  static auto& mutexes = *new std::array<std::shared_mutex, kDevices>;
  return mutexes.at(static_cast<size_t>(device));
}

class CudaWork;
thread_local std::unique_ptr<CudaWork> capturing;

void wait_for(DeviceIndex device) {
  std::shared_lock lock(capture_mutex(device), std::defer_lock);
  if (capturing == nullptr) lock.lock();  // else CUDA says that this cannot be captured
  const CUDAGuard guard(device);
  c10::cuda::device_synchronize();
}

class DevicePool final : public AllocatorPool {
 public:
  DevicePool(DeviceIndex device, c10::MempoolId_t id) : device_(device), id_(id) {}
  // For the thread that does so.
  void begin() override {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_, id_, [thread = std::this_thread::get_id()](cudaStream_t) {
          return std::this_thread::get_id() == thread;
        });
  }
  void end() override { c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, id_); }
  void release() override { c10::cuda::CUDACachingAllocator::releasePool(device_, id_); }

 private:
  const DeviceIndex device_;
  const c10::MempoolId_t id_;
};

class CudaPrivatePool final : public PrivatePool {
 public:
  explicit CudaPrivatePool(DeviceIndex device)
      : CudaPrivatePool(device, at::cuda::graph_pool_handle()) {}
  // The memory is about to be anybody's. What the allocator waits for, where it unmaps expandable
  // segments, is the stream they belong to, that of captures; the work runs on another.
  ~CudaPrivatePool() override {
    try {
      wait_for(device_);
    } catch (const std::exception&) {
      (void)cudaGetLastError();  // a later call says what has become of the device
    }
  }
  const c10::MempoolId_t& id() const { return id_; }

 private:
  CudaPrivatePool(DeviceIndex device, c10::MempoolId_t id)
      : PrivatePool(std::make_unique<DevicePool>(device, id), pinned_pool(id)),
        device_(device),
        id_(id) {}

  const DeviceIndex device_;
  const c10::MempoolId_t id_;
};

// Captured work of a device has its memory from one pool, while there is any such work.
class Pools {
 public:
  static Pools& of(DeviceIndex device) {
    static std::mutex mutex;
    static auto& all = *new std::map<DeviceIndex, Pools>;
    const std::lock_guard lock(mutex);
    return all[device];
  }

  std::shared_ptr<CudaPrivatePool> current(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<CudaPrivatePool> pool = current_.lock();
    if (pool == nullptr) {
      pool = std::make_shared<CudaPrivatePool>(device);
      current_ = pool;
      known_.push_back(pool->id());
    }
    return pool;
  }

  // Of those that nobody holds, too: results of captured work may be in them.
  uint64_t bytes(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = 0;
    std::erase_if(known_, [&](const c10::MempoolId_t& id) {
      uint64_t has = 0;
      for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot(id, false).segments) {
        if (segment.device == device) has += segment.total_size;
      }
      bytes += has;
      return has == 0 && (current_.expired() || id != known_.back());
    });
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<CudaPrivatePool> current_;
  std::vector<c10::MempoolId_t> known_;  // the current one is the last
};

// A stream of ours for each device. Always the same, since the allocator keeps its free blocks by
// stream; and none of torch's pool, which hands its 32 out again to a program that makes more.
class OwnStreams {
 public:
  CUDAStream of(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    const auto known = streams_.find(device);
    if (known != streams_.end()) return known->second;
    const CUDAGuard guard(device);
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return streams_.emplace(device, c10::cuda::getStreamFromExternal(stream, device)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<DeviceIndex, CUDAStream> streams_;
};

// What captures take place on: the default stream cannot be captured.
CUDAStream capture_stream(DeviceIndex device) {
  static auto& streams = *new OwnStreams;
  return streams.of(device);
}

class CudaPool final : public Pool {
 public:
  explicit CudaPool(DeviceIndex device) : CudaPool(device, Pools::of(device).current(device)) {}
  ~CudaPool() override { close(); }

  void close() override {
    pool_.close();
    if (opened() == this) opened() = nullptr;
  }
  void lend() { pool_.lend(); }
  void open() { pool_.open(); }
  void take_back(bool begun) noexcept {
    pool_.take_back(begun);
    (void)cudaGetLastError();  // the failure has been told
    end_draws();
  }
  const c10::MempoolId_t& id() const { return id_; }

  // The one that this thread has.
  static CudaPool*& opened() {
    thread_local CudaPool* pool = nullptr;
    return pool;
  }

 private:
  CudaPool(DeviceIndex device, const std::shared_ptr<CudaPrivatePool>& pool)
      : device_(device), id_(pool->id()), pool_(pool) {
    opened() = this;
  }

  // After a capture that failed torch's generator of this device believes in it, and refuses to be
  // drawn from, until another one has ended well.
  void end_draws() const noexcept {
    try {
      const CUDAStream stream = capture_stream(device_);
      const c10::cuda::CUDAStreamGuard guard(stream);
      const c10::DataPtr byte = c10::cuda::CUDACachingAllocator::get()->allocate(1);
      at::cuda::CUDAGraph graph;
      graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      C10_CUDA_CHECK(cudaMemsetAsync(byte.get(), 0, 1, stream.stream()));
      graph.capture_end();
    } catch (const std::exception&) {
      (void)cudaGetLastError();  // the next capture that ends well does it
    }
  }

  const DeviceIndex device_;
  const c10::MempoolId_t id_;
  OpenPool pool_;
};

// Through memory that the GPU reads by itself; who gives it back to its allocator need not wait.
void upload(void* to, const void* from, size_t nbytes, CUDAStream stream) {
  at::HostAllocator& pinned = *at::getHostAllocator(c10::DeviceType::CUDA);
  const c10::DataPtr staged = pinned.allocate(nbytes);
  std::memcpy(staged.get(), from, nbytes);
  const CUDAGuard guard(stream.device_index());
  C10_CUDA_CHECK(
      cudaMemcpyAsync(to, staged.get(), nbytes, cudaMemcpyHostToDevice, stream.stream()));
  pinned.record_event(staged.get(), staged.get_context(), stream.unwrap());
}

// A graph, launched on the default stream.
class CudaWork final : public CapturedWork {
 public:
  explicit CudaWork(DeviceIndex device) : device_(device), pool_(*CudaPool::opened()) {
    // The allocator serves the pool that was opened first: the graph opens it in its own way.
    pool_.lend();
    std::unique_lock lock(capture_mutex(device_));
    try {
      lend_workspaces(capture_stream(device_));
      guard_.emplace(capture_stream(device_));
      wait(c10::cuda::getDefaultCUDAStream(device_), capture_stream(device_));
      graph_.capture_begin(pool_.id(), cudaStreamCaptureModeThreadLocal);
    } catch (...) {
      pool_.take_back(/*begun=*/false);
      guard_.reset();
      throw;
    }
    alone_ = std::move(lock);
  }
  void end() {
    end_capture();
    alone_.unlock();
    guard_.reset();
    pool_.open();
    graph_.instantiate();
    const CUDAStream stream = c10::cuda::getDefaultCUDAStream(device_);
    wait(capture_stream(device_), stream);
    for (const Upload& each : uploads_) {
      upload(each.to, each.bytes.data(), each.bytes.size(), stream);
    }
    uploads_.clear();
    replay();
  }
  // Done before the work begins.
  void defer_upload(void* to, const void* from, size_t nbytes) {
    const std::string_view bytes(static_cast<const char*>(from), nbytes);
    if (!uploads_.empty() && uploads_.back().to + uploads_.back().bytes.size() == to) {
      uploads_.back().bytes += bytes;
    } else {
      uploads_.push_back({static_cast<char*>(to), std::string(bytes)});
    }
  }
  void abandon() noexcept {
    if (!guard_.has_value()) return;  // the capture went well, and its first launch did not
    try {
      end_capture();
    } catch (const std::exception&) {
      pool_.take_back(/*begun=*/true);
    }
    alone_.unlock();
    guard_.reset();
  }
  void submit() override { replay(); }
  bool begun() const noexcept override { return launched_; }

 private:
  void end_capture() {
    const EmptyGraphsAllowed allowed;
    graph_.capture_end();
  }

  // Where the driver finds no memory for it, a graph is not launched, and draws nothing.
  void replay() {
    launched_ = true;
    auto& draws = *at::check_generator<at::CUDAGeneratorImpl>(
        at::cuda::detail::getDefaultCUDAGenerator(device_));
    const uint64_t drawn = draws.philox_offset_per_thread();
    try {
      graph_.replay();
    } catch (const c10::AcceleratorError& error) {
      launched_ = error.get_error_code() != cudaErrorMemoryAllocation;
      if (!launched_) draws.set_philox_offset_per_thread(drawn);
      throw;
    }
  }

  // `second` goes on when `first` has come to this point: torch sets what its generators use in a
  // graph on the stream of the capture.
  static void wait(CUDAStream first, CUDAStream second) {
    c10::cuda::CUDAEvent event(cudaEventDisableTiming);
    event.record(first);
    event.block(second);
  }

  struct Upload {
    char* to;
    std::string bytes;
  };

  const DeviceIndex device_;
  std::vector<Upload> uploads_;
  CudaPool& pool_;                             // only until the end of the capture
  std::unique_lock<std::shared_mutex> alone_;  // so, too
  std::optional<c10::cuda::CUDAStreamGuard> guard_;
  at::cuda::CUDAGraph graph_{/*keep_graph=*/true};  // what is abandoned is not instantiated
  bool launched_ = false;
};

// Torch's CUDA state (allocator, handles) comes into being at the first use, never at import.
void start_cuda() { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }

class CudaBackend final : public Backend {
 public:
  const char* name() const noexcept override { return "cuda"; }
  c10::DeviceType alias_type() const noexcept override { return c10::DeviceType::CUDA; }

  DeviceIndex device_count() const noexcept override { return c10::cuda::device_count(); }
  DeviceIndex current_device() const override { return c10::cuda::current_device(); }
  DeviceIndex exchange_device(DeviceIndex device) override {
    if (device < 0) return current_device();
    return c10::cuda::ExchangeDevice(device);
  }
  void unchecked_set_device(DeviceIndex device) noexcept override {
    if (device >= 0) C10_CUDA_CHECK_WARN(c10::cuda::MaybeSetDevice(device));
  }
  bool has_context(DeviceIndex device) const override {
    return c10::cuda::hasPrimaryContext(device);
  }
  DeviceProperties properties(DeviceIndex device) override {
    check_device(device);
    cudaDeviceProp cuda;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&cuda, device));
    DeviceProperties result;
    result.name = cuda.name;
    result.total_memory = cuda.totalGlobalMem;
    result.major = cuda.major;
    result.minor = cuda.minor;
    result.multiprocessors = cuda.multiProcessorCount;
    return result;
  }
  DeviceIndex device_of(void* address) override {
    start_cuda();
    cudaPointerAttributes attributes;
    C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
    ACC_CHECK(attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged,
              "[torch.acc] the address ", address,
              " is not memory of a GPU. Copy the data to the device instead.");
    return static_cast<DeviceIndex>(attributes.device);
  }

  c10::Allocator* allocator() override {
    start_cuda();
    return c10::cuda::CUDACachingAllocator::get();
  }
  void copy(void* to, const void* from, size_t nbytes, DeviceIndex device) override {
    if (nbytes == 0) return;
    const CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice,
                                   to_cuda(default_stream(device)).stream()));
  }
  void upload(void* to, const void* from, size_t nbytes, DeviceIndex device) override {
    if (nbytes == 0) return;
    if (capturing != nullptr) return capturing->defer_upload(to, from, nbytes);
    runtime::upload(to, from, nbytes, c10::cuda::getDefaultCUDAStream(device));
  }
  c10::CachingDeviceAllocator::DeviceStats memory_stats(DeviceIndex device) override {
    start_cuda();
    return c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  }
  uint64_t captured_bytes(DeviceIndex device) override { return Pools::of(device).bytes(device); }
  // A guess: nodes of a graph and of its executable form. gpu_check tells what it is.
  uint64_t host_bytes_per_call() const noexcept override { return 4096; }
  void reset_peak_memory(DeviceIndex device) override {
    start_cuda();
    c10::cuda::CUDACachingAllocator::resetPeakStats(device);
  }
  void reset_accumulated_memory(DeviceIndex device) override {
    start_cuda();
    c10::cuda::CUDACachingAllocator::resetAccumulatedStats(device);
  }
  std::pair<size_t, size_t> memory_info(DeviceIndex device) override {
    check_device(device);
    const CUDAGuard guard(device);
    size_t free = 0;
    size_t total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {free, total};
  }
  void empty_cache() override {
    start_cuda();
    // It is that of all devices, and an error while one of them is captured. Where torch records
    // what becomes of memory, the allocator asks for the interpreter lock: nobody waits with it.
    const GilRelease release;
    OpenPool::when_none([] { c10::cuda::CUDACachingAllocator::emptyCache(); });
  }
  void record_stream(const c10::DataPtr& memory, Stream stream) override {
    start_cuda();
    c10::cuda::CUDACachingAllocator::recordStream(memory, to_cuda(stream));
  }

  at::HostAllocator& host_allocator() override {
    start_cuda();
    return *at::getHostAllocator(c10::DeviceType::CUDA);
  }
  bool is_pinned(const void* address) override {
    return at::detail::getCUDAHooks().isPinnedPtr(address);
  }

  void synchronize(DeviceIndex device) override { wait_for(device); }
  Stream default_stream(DeviceIndex device) override {
    return to_acc(c10::cuda::getDefaultCUDAStream(device));
  }
  Stream copy_stream(DeviceIndex device) override {
    static auto& streams = *new OwnStreams;
    start_cuda();
    return to_acc(streams.of(device));
  }
  Stream current_stream(DeviceIndex device) override {
    return to_acc(c10::cuda::getCurrentCUDAStream(device));
  }
  Stream new_stream(DeviceIndex device, int priority) override {
    return to_acc(c10::cuda::getStreamFromPool(priority, device));
  }
  Stream exchange_stream(Stream stream) override {
    const Stream before = current_stream(stream.device_index());
    c10::cuda::setCurrentCUDAStream(to_cuda(stream));
    return before;
  }
  bool query_stream(Stream stream) override { return to_cuda(stream).query(); }
  void synchronize_stream(Stream stream) override { to_cuda(stream).synchronize(); }
  void* native_stream(Stream stream) override { return to_cuda(stream).stream(); }
  bool captured_by_program(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(to_cuda(stream).stream(), &status));
    return status != cudaStreamCaptureStatusNone;
  }

  std::unique_ptr<Marker> mark(Stream stream, bool timing, std::unique_ptr<Marker> reuse) override {
    if (reuse == nullptr) reuse = std::make_unique<CudaMarker>(timing);
    event_of(*reuse).record(to_cuda(stream));
    return reuse;
  }
  bool passed(const Marker& marker) override { return event_of(marker).query(); }
  void wait(const Marker& marker) override { event_of(marker).synchronize(); }
  void block(const Marker& marker, Stream stream) override {
    event_of(marker).block(to_cuda(stream));
  }
  double elapsed_ms(const Marker& from, const Marker& to) override {
    return event_of(from).elapsed_time(event_of(to));
  }

  // Private pools are torch's own allocator's, not cudaMallocAsync's.
  bool can_capture(DeviceIndex) override {
    return c10::cuda::CUDACachingAllocator::name() == "native";
  }
  std::unique_ptr<Pool> open_pool(DeviceIndex device) override {
    return std::make_unique<CudaPool>(device);
  }
  void begin_capture(DeviceIndex device) override {
    ACC_CHECK(capturing == nullptr && CudaPool::opened() != nullptr);
    capturing = std::make_unique<CudaWork>(device);
  }
  void note(std::function<void()>) override {}  // the stream knows
  void check_capture(DeviceIndex device) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    C10_CUDA_CHECK(cudaStreamIsCapturing(capture_stream(device).stream(), &status));
    ACC_CHECK(status == cudaStreamCaptureStatusActive,
              "CUDA's capture is invalid after it: it did what no capture may do (wait for the "
              "device, use another stream) and threw nothing");
  }
  std::unique_ptr<CapturedWork> end_capture(DeviceIndex) override {
    capturing->end();
    return std::move(capturing);
  }
  bool abandon_capture(DeviceIndex) noexcept override {
    if (capturing != nullptr) capturing->abandon();
    capturing.reset();
    return false;
  }
};

}  // namespace

Backend* cuda_backend() {
  // Never destroyed: tensors and events may outlive static destructors.
  static Backend* const instance = new CudaBackend;
  return instance;
}

void probe_cuda(GpuProbe& probe) {
  probe.built_with_cuda = true;
  probe.cuda_version = CUDART_VERSION;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();  // the error was told here and is not to fail a later call
  if (error == cudaSuccess) {
    probe.devices = count;
  } else {
    probe.error = cudaGetErrorString(error);
  }
  probe.none_visible = error == cudaErrorNoDevice || (error == cudaSuccess && count == 0);
  for (int device = 0; device < probe.devices; ++device) {
    int major = 0;
    int minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    probe.capabilities.push_back(10 * major + minor);
  }
  // Among much else it says "NVCC architecture flags: -gencode;arch=...,code=sm_90;...".
  if (probe.devices > 0) probe.architectures = at::detail::getCUDAHooks().showConfig();
}

}  // namespace acc::runtime
