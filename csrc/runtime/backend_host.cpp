#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/host_heap.h"
#include "csrc/runtime/memory.h"
#include "csrc/runtime/pinned.h"

// The CPU as one or several devices. They share its memory and its threads; work that was submitted
// is done when the submission returns, so that streams are names only and waits return at once.
namespace acc::runtime {

namespace {

using c10::DeviceIndex;
using c10::Stream;

constexpr c10::StreamId kDefaultStream = 0;

struct HostMarker final : Marker {
  std::chrono::steady_clock::time_point time;
};

std::atomic<int64_t> upload_us{0};

thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, base::env::kMaxHostDevices> current_streams{};

Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, acc_device(device), id);
}

// The value after `key` in a file of lines "key<separator>value", without surrounding blanks.
std::string field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

size_t page_count(int name) {
  const long pages = sysconf(name);
  return pages < 0 ? 0 : static_cast<size_t>(pages);
}

// What a container may use, or the largest number.
size_t container_limit(const char* path) {
  std::ifstream file(path);
  size_t bytes = 0;
  return file >> bytes ? bytes : std::numeric_limits<size_t>::max();
}

size_t total_memory() {
  const size_t physical = page_count(_SC_PHYS_PAGES) * page_count(_SC_PAGESIZE);
  return std::min(physical, container_limit("/sys/fs/cgroup/memory.max"));
}

size_t free_memory() {
  const std::string available = field("/proc/meminfo", "MemAvailable");
  size_t bytes = 0;
  for (const char c : available) {
    if (c < '0' || c > '9') break;
    bytes = bytes * 10 + static_cast<size_t>(c - '0');
  }
  bytes = bytes > 0 ? bytes * 1024 : page_count(_SC_AVPHYS_PAGES) * page_count(_SC_PAGESIZE);
  const size_t limit = container_limit("/sys/fs/cgroup/memory.max");
  if (limit == std::numeric_limits<size_t>::max()) return bytes;
  const size_t used = container_limit("/sys/fs/cgroup/memory.current");
  return std::min(bytes, used < limit ? limit - used : 0);
}

class HostPool final : public Pool {
 public:
  explicit HostPool(DeviceIndex device) : device_(device), scope_(std::in_place, device) {
    HostPoolScope::keep(device_);
  }
  ~HostPool() override { HostPoolScope::let_go(device_); }
  void close() override { scope_.reset(); }

 private:
  const DeviceIndex device_;
  std::optional<HostPoolScope> scope_;
};

struct HostWork final : CapturedWork {
  std::vector<std::function<void()>> calls;
  size_t next = 0;
  bool has_begun = false;

  void submit() override {
    has_begun = false;
    about_to_submit();
    has_begun = true;
    next = 0;
    go_on();
  }
  bool begun() const noexcept override { return has_begun; }
  bool may_go_on() const noexcept override { return next < calls.size(); }
  void go_on() override {
    for (; next < calls.size(); ++next) calls[next]();
  }
};

thread_local std::unique_ptr<HostWork> deferring;

class HostBackend final : public Backend {
 public:
  const char* name() const noexcept override { return "host"; }
  c10::DeviceType alias_type() const noexcept override { return c10::DeviceType::CPU; }

  DeviceIndex device_count() const noexcept override {
    // A bad value of the variables was told when the device was registered.
    try {
      return static_cast<DeviceIndex>(base::env::host_devices());
    } catch (const std::exception&) {
      return 0;
    }
  }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex exchange_device(DeviceIndex device) override {
    if (device < 0) return current;
    check_device(device);
    return std::exchange(current, device);
  }
  void unchecked_set_device(DeviceIndex device) noexcept override {
    if (device >= 0) current = device;
  }
  bool has_context(DeviceIndex device) const override {
    return device >= 0 && device < device_count();
  }
  DeviceProperties properties(DeviceIndex device) override {
    check_device(device);
    DeviceProperties result;
    const std::string model = field("/proc/cpuinfo", "model name");
    result.name = "acc host executor" + (model.empty() ? model : " (" + model + ")");
    result.total_memory = total_memory();
    result.multiprocessors = static_cast<int>(std::thread::hardware_concurrency());
    return result;
  }
  DeviceIndex device_of(void*) override { return current; }

  c10::Allocator* allocator() override { return &host_heap(); }
  void copy(void* to, const void* from, size_t nbytes, DeviceIndex) override {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
  }
  void upload(void* to, const void* from, size_t nbytes, DeviceIndex device) override {
    const std::chrono::microseconds more(upload_us.load(std::memory_order_relaxed));
    if (more.count() > 0) std::this_thread::sleep_for(more);
    copy(to, from, nbytes, device);
  }
  c10::CachingDeviceAllocator::DeviceStats memory_stats(DeviceIndex device) override {
    return counted_memory(device);
  }
  uint64_t captured_bytes(DeviceIndex device) override { return HostPoolScope::bytes(device); }
  uint64_t host_bytes_per_call() const noexcept override { return sizeof(std::function<void()>); }
  void reset_peak_memory(DeviceIndex device) override { runtime::reset_peak_memory(device); }
  void reset_accumulated_memory(DeviceIndex device) override {
    runtime::reset_accumulated_memory(device);
  }
  std::pair<size_t, size_t> memory_info(DeviceIndex device) override {
    check_device(device);
    const size_t total = total_memory();
    return {std::min(free_memory(), total), total};
  }
  void empty_cache() override { trim_host_heap(); }
  void record_stream(const c10::DataPtr&, Stream) override {}

  at::HostAllocator& host_allocator() override { return page_allocator(); }
  bool is_pinned(const void* address) override { return owned_by_page_allocator(address); }

  void synchronize(DeviceIndex) override {}
  Stream default_stream(DeviceIndex device) override { return stream_of(device, kDefaultStream); }
  Stream copy_stream(DeviceIndex device) override { return default_stream(device); }
  Stream current_stream(DeviceIndex device) override {
    check_device(device);
    return stream_of(device, current_streams[static_cast<size_t>(device)]);
  }
  Stream new_stream(DeviceIndex device, int) override {
    static std::atomic<c10::StreamId> next{kDefaultStream + 1};
    check_device(device);
    return stream_of(device, next.fetch_add(1, std::memory_order_relaxed));
  }
  Stream exchange_stream(Stream stream) override {
    check_device(stream.device_index());
    c10::StreamId& slot = current_streams[static_cast<size_t>(stream.device_index())];
    return stream_of(stream.device_index(), std::exchange(slot, stream.id()));
  }
  bool query_stream(Stream) override { return true; }
  void synchronize_stream(Stream) override {}
  void* native_stream(Stream) override { return nullptr; }
  bool captured_by_program(Stream) override { return false; }

  std::unique_ptr<Marker> mark(Stream, bool, std::unique_ptr<Marker> reuse) override {
    if (reuse == nullptr) reuse = std::make_unique<HostMarker>();
    static_cast<HostMarker&>(*reuse).time = std::chrono::steady_clock::now();
    return reuse;
  }
  bool passed(const Marker&) override { return true; }
  void wait(const Marker&) override {}
  void block(const Marker&, Stream) override {}
  double elapsed_ms(const Marker& from, const Marker& to) override {
    return std::chrono::duration<double, std::milli>(static_cast<const HostMarker&>(to).time -
                                                     static_cast<const HostMarker&>(from).time)
        .count();
  }

  bool can_capture(DeviceIndex device) override { return HostPoolScope::possible(device); }
  std::unique_ptr<Pool> open_pool(DeviceIndex device) override {
    return std::make_unique<HostPool>(device);
  }
  void begin_capture(DeviceIndex) override {
    ACC_CHECK(deferring == nullptr);
    about_to_capture();
    deferring = std::make_unique<HostWork>();
  }
  void note(std::function<void()> work) override {
    ACC_CHECK(deferring != nullptr);
    deferring->calls.push_back(std::move(work));
  }
  void check_capture(DeviceIndex) override {}  // what it does is done
  std::unique_ptr<CapturedWork> end_capture(DeviceIndex) override { return std::move(deferring); }
  bool abandon_capture(DeviceIndex) noexcept override {
    deferring.reset();
    return true;
  }
};

}  // namespace

void slow_uploads(int64_t microseconds) { upload_us.store(microseconds); }

Backend& host_backend() {
  // Never destroyed: tensors and events may outlive static destructors.
  static Backend& instance = *new HostBackend;
  return instance;
}

}  // namespace acc::runtime
