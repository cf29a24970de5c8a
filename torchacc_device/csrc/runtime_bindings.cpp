#include "torchacc_device/csrc/runtime_bindings.h"

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/runtime/address_space.h"
#include "csrc/runtime/allocator.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/fork.h"
#include "csrc/runtime/generator.h"
#include "csrc/runtime/host_heap.h"
#include "csrc/runtime/nvidia.h"
#include "csrc/runtime/pinned.h"
#include "lazy/session/session.h"
#include "torchacc_device/csrc/guarded.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;
using c10::DeviceIndex;
using runtime::backend;

using MemoryRow = std::pair<std::string, int64_t>;

void add_rows(std::vector<MemoryRow>& rows, const std::string& name,
              const c10::CachingAllocator::Stat& stat) {
  rows.emplace_back(name + ".current", stat.current);
  rows.emplace_back(name + ".peak", stat.peak);
  rows.emplace_back(name + ".allocated", stat.allocated);
  rows.emplace_back(name + ".freed", stat.freed);
}

std::vector<MemoryRow> memory_rows(DeviceIndex device) {
  const auto stats = runtime::device_allocator().getDeviceStats(device);
  std::vector<MemoryRow> rows;
  add_rows(rows, "allocation.all", stats.allocation[0]);
  add_rows(rows, "allocated_bytes.all", stats.allocated_bytes[0]);
  add_rows(rows, "reserved_bytes.all", stats.reserved_bytes[0]);
  add_rows(rows, "active_bytes.all", stats.active_bytes[0]);
  rows.emplace_back("num_alloc_retries", stats.num_alloc_retries);
  rows.emplace_back("num_ooms", stats.num_ooms);
  return rows;
}

std::vector<MemoryRow> host_memory_rows() {
  const at::HostStats stats = runtime::pinned_allocator().get_stats();
  std::vector<MemoryRow> rows;
  add_rows(rows, "active_requests", stats.active_requests);
  add_rows(rows, "active_bytes", stats.active_bytes);
  add_rows(rows, "allocations", stats.allocations);
  add_rows(rows, "allocated_bytes", stats.allocated_bytes);
  rows.emplace_back("num_host_alloc", stats.num_host_alloc);
  rows.emplace_back("num_host_free", stats.num_host_free);
  return rows;
}

py::dict as_dict(const std::vector<MemoryRow>& rows) {
  py::dict result;
  for (const auto& [name, value] : rows) result[py::str(name)] = value;
  return result;
}

runtime::Failure failure_named(const std::string& name) {
  using runtime::Failure;
  const std::pair<const char*, Failure> known[] = {{"memory", Failure::kNoMemory},
                                                   {"cuda", Failure::kCuda},
                                                   {"cublas", Failure::kCublas},
                                                   {"lost", Failure::kLost}};
  for (const auto& [each, failure] : known) {
    if (name == each) return failure;
  }
  TORCH_CHECK_VALUE(false, "failure is \"", name, "\": use memory, cuda, cublas or lost");
}

void bind_devices(py::module_& m) {
  m.def("init", unlocked([] {
          runtime::note_use();
          backend();
        }),
        "Chooses the executor and makes the device ready. Throws where it cannot be used.");
  m.def("fail_allocations",
        guarded([](int64_t after, int64_t times, size_t at_least, const std::string& failure) {
          runtime::fail_allocations(after, times, at_least, failure_named(failure));
        }),
        py::arg("after"), py::arg("times"), py::arg("at_least") = 0, py::arg("failure") = "memory",
        "For tests: `after` allocations of CPU memory succeed, then `times` fail; 0 ends it. Those "
        "of less than `at_least` bytes do not count. `failure`: \"memory\" as on a host, \"cuda\" "
        "or \"cublas\" as theirs, \"lost\" as those of a device that is gone.");
  m.def("fail_captured_work", guarded(runtime::fail_captured_work), py::arg("captures"),
        py::arg("submissions"),
        "For tests: the host's next captures, and submissions of captured work, fail before they "
        "have begun, as CUDA's do for want of memory.");
  m.def("fail_waits", guarded(runtime::fail_waits), py::arg("error"),
        py::arg("times") = std::numeric_limits<int64_t>::max(),
        "For tests: the next waits for a device fail with this number of CUDA's; 0 ends it.");
  m.def("slow_uploads", guarded(runtime::slow_uploads), py::arg("microseconds"),
        "For tests: each upload of kernels' arguments on the host takes so much longer; 0 ends "
        "it.");
  m.def("limit_memory", unlocked(runtime::limit_host_heap), py::arg("more").none(true),
        "For tests: room for so many bytes more on the host executor, where cached memory counts; "
        "None ends it.");
  m.def("allocations_counted", guarded([] { return runtime::allocations_counted(); }),
        "For tests: allocations of CPU memory since the last call of fail_allocations.");
  m.def("is_initialized", guarded([] { return runtime::was_used() && !runtime::in_bad_fork(); }));
  m.def("is_in_bad_fork", guarded([] { return runtime::in_bad_fork(); }));
  m.def("device_count", unlocked([] { return static_cast<int>(backend().device_count()); }));
  m.def("current_device", unlocked([] { return static_cast<int>(backend().current_device()); }));
  m.def("set_device", unlocked([](DeviceIndex device) {
          runtime::check_device(device);
          backend().exchange_device(device);
        }),
        py::arg("device"));
  m.def("exchange_device", unlocked([](DeviceIndex device) {
          return static_cast<int>(device < 0 ? device : backend().exchange_device(device));
        }),
        py::arg("device"), "Makes a device current and returns the one that was; -1 does nothing.");
  m.def("executor_name", unlocked([] { return std::string(backend().name()); }));
  m.def("is_cuda_build", guarded([] { return runtime::cuda_backend() != nullptr; }));
  m.def("synchronize", unlocked([](DeviceIndex device) { runtime::synchronize(device); }),
        py::arg("device") = -1);
  m.def(
      "device_properties",
      [](DeviceIndex device) {
        const runtime::DeviceProperties found =
            unlocked([](DeviceIndex index) { return backend().properties(index); })(device);
        py::dict result;
        result["name"] = found.name;
        result["total_memory"] = found.total_memory;
        result["major"] = found.major;
        result["minor"] = found.minor;
        result["multi_processor_count"] = found.multiprocessors;
        return result;
      },
      py::arg("device"));
  m.def("unusable_gpu",
        guarded([](bool present, const std::string& driver_version, bool built_with_cuda,
                   int cuda_version, int devices, bool none_visible, const std::string& error,
                   const std::vector<int>& capabilities, const std::string& architectures) {
          const runtime::GpuProbe probe{present,      driver_version, built_with_cuda,
                                        cuda_version, devices,        error,
                                        none_visible, capabilities,   architectures};
          return std::make_pair(runtime::unusable_gpu(probe).value_or(""),
                                runtime::unusable_beside(probe).value_or(""));
        }),
        py::arg("present"), py::arg("driver_version"), py::arg("built_with_cuda"),
        py::arg("cuda_version"), py::arg("devices"), py::arg("none_visible"), py::arg("error"),
        py::arg("capabilities"), py::arg("architectures"),
        "Why a GPU that was found in this state cannot be used, and why those beside one that can "
        "be; empty if there is no problem.");
  m.def("gpu_problem",
        unlocked([] { return runtime::unusable_gpu(runtime::probe_gpu()).value_or(""); }),
        "Why this machine's NVIDIA GPU cannot be used; empty if it can or if there is none.");
}

void bind_streams(py::module_& m) {
  m.def("default_stream", unlocked([](DeviceIndex device) {
          runtime::check_device(device);
          const c10::StreamData3 data = backend().default_stream(device).pack3();
          return std::make_tuple(data.stream_id, static_cast<int64_t>(data.device_index),
                                 static_cast<int64_t>(data.device_type));
        }),
        py::arg("device"), "Stream id, device index and device type, as torch.Stream takes them.");
}

void bind_memory(py::module_& m) {
  m.def(
      "memory_stats", [](DeviceIndex device) { return as_dict(unlocked(&memory_rows)(device)); },
      py::arg("device"));
  m.def("reset_peak_memory_stats",
        unlocked([](DeviceIndex device) { runtime::device_allocator().resetPeakStats(device); }),
        py::arg("device"));
  m.def("reset_accumulated_memory_stats", unlocked([](DeviceIndex device) {
          runtime::device_allocator().resetAccumulatedStats(device);
        }),
        py::arg("device"));
  m.def("mem_get_info", unlocked([](DeviceIndex device) {
          return runtime::device_allocator().getMemoryInfo(device);
        }),
        py::arg("device"), "Free and total bytes.");
  m.def(
      "held_memory", unlocked([](DeviceIndex device) {
        const auto stats = backend().memory_stats(device);
        const auto& all =
            stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
        return std::vector<std::pair<std::string, int64_t>>{
            {"tensors", all.current},
            {"at most", all.peak},
            {"of captured work", static_cast<int64_t>(backend().captured_bytes(device))},
            {"of captured work, on the host",
             static_cast<int64_t>(session::captures_bytes(device))}};
      }),
      "Bytes by what has them. Submits nothing.");
  m.def("captured_bytes",
        unlocked([](DeviceIndex device) { return backend().captured_bytes(device); }),
        py::arg("device"), "What pools of captured work have.");
  m.def("empty_cache", unlocked([] { runtime::device_allocator().emptyCache(); }));
  m.def("host_memory_stats", [] { return as_dict(unlocked(&host_memory_rows)()); });
  m.def("reset_peak_host_memory_stats",
        unlocked([] { runtime::pinned_allocator().reset_peak_stats(); }));
  m.def("reset_accumulated_host_memory_stats",
        unlocked([] { runtime::pinned_allocator().reset_accumulated_stats(); }));
  m.def("is_reserved", guarded([](uintptr_t address) {
          return runtime::reserved(reinterpret_cast<const void*>(address));
        }),
        py::arg("address"), "Whether an address belongs to a storage without memory.");
}

void bind_generators(py::module_& m) {
  m.def("default_generator",
        guarded([](DeviceIndex device) { return runtime::default_generator(device); }),
        py::arg("device"));
  m.def("manual_seed", guarded([](DeviceIndex device, uint64_t seed) {
          runtime::default_generator(device).unsafeGetGeneratorImpl()->set_current_seed(seed);
        }),
        py::arg("device"), py::arg("seed"));
  m.def("seed_all", unlocked(&runtime::seed_all), py::arg("seed"));
}

}  // namespace

void bind_runtime(py::module_& m) {
  bind_devices(m);
  bind_streams(m);
  bind_memory(m);
  bind_generators(m);
}

}  // namespace acc::bindings
