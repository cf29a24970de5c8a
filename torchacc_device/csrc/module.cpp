#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <dlfcn.h>

#include <chrono>
#include <string>

#include "csrc/aten/meta_kernels.h"
#include "csrc/aten/meta_rules.h"
#include "csrc/aten/record_kernel.h"
#include "csrc/aten/schema.h"
#include "csrc/aten/sync_batch_norm.h"
#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/register.h"
#include "kernels/device/device_kernels.h"
#include "kernels/jit/compile.h"
#include "lazy/graph/formula.h"
#include "lazy/record/infer.h"
#include "lazy/record/recorder.h"
#include "lazy/session/session.h"
#include "torchacc_device/csrc/batch_bindings.h"
#include "torchacc_device/csrc/capture_bindings.h"
#include "torchacc_device/csrc/debug_bindings.h"
#include "torchacc_device/csrc/distributed_bindings.h"
#include "torchacc_device/csrc/dlpack_bindings.h"
#include "torchacc_device/csrc/guarded.h"
#include "torchacc_device/csrc/locator.h"
#include "torchacc_device/csrc/plan_bindings.h"
#include "torchacc_device/csrc/runtime_bindings.h"

namespace py = pybind11;

namespace acc {
namespace {

using record::FlushReason;

FlushReason reason_of(const std::string& name) {
  if (name == "explicit") return FlushReason::kExplicit;
  if (name == "step") return FlushReason::kStep;
  if (name == "loader") return FlushReason::kLoader;
  if (name == "pointer") return FlushReason::kPointer;
  if (name == "read") return FlushReason::kRead;
  throw py::value_error("flush: unknown reason '" + name +
                        "'; use explicit, step, loader, pointer or read");
}

bool python_runs() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool ending = Py_IsFinalizing() != 0;
#else
  const bool ending = _Py_IsFinalizing() != 0;
#endif
  return Py_IsInitialized() != 0 && !ending;
}

void install_python() {
  runtime::Gil gil;
  gil.held = [] { return PyGILState_Check() != 0 && Py_IsInitialized() != 0; };
  gil.release = [] { return static_cast<void*>(PyEval_SaveThread()); };
  gil.acquire = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); };
  static constexpr intptr_t kNotNull = 1;  // added to a state, so that each is a token
  gil.hold = []() -> void* {
    if (!python_runs()) return nullptr;
    return reinterpret_cast<void*>(static_cast<intptr_t>(PyGILState_Ensure()) + kNotNull);
  };
  gil.let_go = [](void* token) {
    const auto state = reinterpret_cast<intptr_t>(token) - kNotNull;
    PyGILState_Release(static_cast<PyGILState_STATE>(state));
  };
  gil.is_interrupt = [](const std::exception& error) {
    py::gil_scoped_acquire acquire;
    if (const auto* raised = dynamic_cast<const python_error*>(&error)) {
      return raised->type != nullptr &&
             PyErr_GivenExceptionMatches(raised->type, PyExc_KeyboardInterrupt) != 0;
    }
    const auto* raised = dynamic_cast<const py::error_already_set*>(&error);
    return raised != nullptr && raised->matches(PyExc_KeyboardInterrupt);
  };
  gil.add_note = [](const std::exception& error, const std::string& note) {
    const auto* raised = dynamic_cast<const python_error*>(&error);
    const auto* caught = dynamic_cast<const py::error_already_set*>(&error);
    if (raised == nullptr && caught == nullptr) return false;
    py::gil_scoped_acquire acquire;
    const py::handle value(raised != nullptr ? raised->value : caught->value().ptr());
    // Python before 3.11 has no notes, and before 3.12 an error may still be without its object.
    if (value && py::hasattr(value, "add_note")) value.attr("add_note")(note);
    return true;
  };
  // Looks and puts it back: no handler runs under our locks.
  gil.interrupted = [] {
    if (!python_runs()) return false;
    const runtime::GilHold held;
    if (PyOS_InterruptOccurred() == 0) return false;
    PyErr_SetInterrupt();
    return true;
  };
  gil.handle_signals = [] {
    if (!python_runs()) return;
    const runtime::GilHold held;
    if (PyErr_CheckSignals() == 0) return;
    python_error raised;
    raised.persist();
    throw raised;
  };
  runtime::install_gil(gil);
  if (base::env::source_lines()) record::install_locator(bindings::locator());
}

// Seconds that `n` recorded additions of 4x4 tensors take through the dispatcher below autograd, in
// steps of `step` that follow one plan. The steps' execution is not counted.
double bench_record(int64_t n, int64_t step) {
  py::gil_scoped_release release;
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor a = at::ones({4, 4}, at::TensorOptions().device("acc"));
  const at::Tensor b = at::ones({4, 4}, at::TensorOptions().device("acc"));
  session::flush(-1, FlushReason::kExplicit);
  double seconds = 0;
  constexpr int kWarmUp = 3;  // build the plan, meet it again, follow it
  for (int64_t done = -kWarmUp * step; done < n; done += step) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < step; ++i) at::add(a, b);
    const auto end = std::chrono::steady_clock::now();
    if (done >= 0) seconds += std::chrono::duration<double>(end - begin).count();
    session::flush(-1, FlushReason::kExplicit);
  }
  return seconds;
}

py::dict stats() {
  py::dict result;
  for (const auto& [name, value] : base::snapshot_counters()) result[py::str(name)] = value;
  return result;
}

py::dict cache_info() {
  const jit::CacheInfo info = jit::cache_info();
  py::dict result;
  result["directory"] = info.directory;
  result["files"] = info.files;
  result["bytes"] = info.bytes;
  result["max_bytes"] = info.max_bytes;
  result["problem"] = info.problem;
  return result;
}

void check_acc(const char* function, const at::Tensor& tensor) {
  if (tensor.device().type() == c10::DeviceType::PrivateUse1) return;
  throw py::type_error(
      base::concat(function, ": expected an acc tensor, got one on ", tensor.device().str()));
}

void bind_session(py::module_& m) {
  m.def(
      "flush",
      [](int device, const std::string& reason) {
        session::flush(static_cast<c10::DeviceIndex>(device), reason_of(reason));
      },
      py::arg("device") = -1, py::arg("reason") = "explicit",
      "Submits what is pending on a device (all: -1).");
  m.def(
      "alias",
      [](const at::Tensor& tensor) {
        check_acc("alias", tensor);
        py::gil_scoped_release release;
        return session::alias(tensor, FlushReason::kPointer);
      },
      py::arg("tensor"), "The CPU or CUDA tensor that shares the memory of an acc tensor.");
  m.def(
      "share",
      [](const at::Tensor& tensor) {
        check_acc("share", tensor);
        py::gil_scoped_release release;
        return session::share(tensor);
      },
      py::arg("tensor"),
      "The same, to keep: from now on operators on the acc tensor's storage run at once.");
  m.def(
      "mark_step", [] { session::flush(-1, FlushReason::kStep); },
      "Ends the step being recorded on every device.");
  m.def("pending", [](int device) {
    return record::recorder(static_cast<c10::DeviceIndex>(device)).pending();
  });
  m.def("stats", &stats, "All counters by name.");
  m.def("reset_stats", &base::reset_counters);
  m.def("ops", &aten::describe_ops, "The recorded operators with the roles of their arguments.");
  m.def("release_memory", [](int device) {
    py::gil_scoped_release release;
    session::release_memory(static_cast<c10::DeviceIndex>(device));
  });
  m.def(
      "capture_plans",
      [](std::optional<bool> on) {
        py::gil_scoped_release release;
        session::capture_plans(on);
      },
      py::arg("on"),
      "Whether plans that repeat are captured from now on; None: as on this device anyway, on a "
      "host "
      "as ACC_HOST_GRAPHS says.");
  m.def(
      "refuse_captures",
      [](const std::string& names) {
        py::gil_scoped_release release;
        session::refuse_captures(names);
      },
      py::arg("names"),
      "For tests: the host captures as a GPU does, and these operators (\"late\" and a name: those "
      "that spoil the capture without a word), \"begin\", \"begin later\" or \"end\" (or "
      "\"nothing\") refuse; empty ends it.");
  m.def(
      "emulate_gpu",
      [](const std::string& path) {
        using Kernels = const device::DeviceKernels* (*)();
        Kernels kernels = [] { return static_cast<const device::DeviceKernels*>(nullptr); };
        if (!path.empty()) {
          void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
          ACC_CHECK(library != nullptr, "[torch.acc] ", dlerror());
          kernels = reinterpret_cast<Kernels>(dlsym(library, "acc_emulated_kernels"));
          ACC_CHECK(kernels != nullptr, "[torch.acc] ", path, " is no emulator");
        }
        py::gil_scoped_release release;
        device::use_device_kernels(kernels());
        for (int i = 0; i < runtime::backend().device_count(); ++i) {
          session::release_memory(static_cast<c10::DeviceIndex>(i));
        }
      },
      py::arg("path"),
      "Kernels of plans are those of a GPU from now on, run by the emulator of "
      "tests/cuda_emulator; "
      "an empty path: those of the host again.");
  m.def(
      "skip_passes",
      [](const std::string& names) {
        py::gil_scoped_release release;
        session::skip_passes(names);
      },
      py::arg("names"), "Leaves out passes from now on, as ACC_SKIP_PASSES does.");
  m.def(
      "run_alike",
      [] {
        py::gil_scoped_release release;
        session::run_alike();
      },
      "Several processes train together: nothing that changes bits is decided by time any more.");
  m.def(
      "run_unfused",
      [] {
        py::gil_scoped_release release;
        session::run_unfused();
      },
      "Plans have no generated kernels from now on, as with ACC_MODE=nofuse.");
  m.def("kernels_problem", bindings::unlocked(session::kernels_problem),
        "Why there are no generated kernels here; an empty text where there are.");
  m.def("operators_with_formulas", &graph::operators_with_formulas,
        "The operators that generated kernels know.");
  m.def("forget_inferences", &record::forget_inferences);
  m.def("set_library_folders", &bindings::set_library_folders, py::arg("folders"),
        "Frames of code below these folders are not named as the place of an error.");
  m.def("inferring", &record::inferring);
  m.def("bench_record", &bench_record, py::arg("n"), py::arg("step") = 1000);
  m.def("stop", [] {
    py::gil_scoped_release release;
    std::string problem = session::stop();
    jit::stop();  // Python ends by a signal after an interrupt, and then nothing happens at exit
    return problem;
  });
  m.def("mode", [] { return std::string(base::env::name(base::env::mode())); });
  m.def("environment", [] {
    py::list rows;
    for (const auto& row : base::env::table()) {
      rows.append(py::make_tuple(row.name, row.type, row.allowed, row.default_value, row.doc));
    }
    return rows;
  });
  m.def("unknown_environment", &base::env::unknown);
  m.def("cache_info", &cache_info, "The kernels kept on disk: directory, files, bytes, problem.");
  m.def("clear_cache", &jit::clear_cache, "Removes the kernels kept on disk.");
}

}  // namespace
}  // namespace acc

PYBIND11_MODULE(_C, m) {
  m.doc() = "The acc device: registration and the functions behind torch.acc and torchacc.";
  acc::base::env::validate();
  acc::runtime::register_runtime();
  acc::record::register_storage();
  acc::aten::register_sync_batch_norm();
  acc::aten::register_fallbacks();
  acc::aten::register_recorded_ops();
  acc::aten::register_meta_kernels();
  acc::aten::register_meta_rules();
  acc::session::start();
  acc::install_python();
  acc::bindings::bind_runtime(m);
  acc::bindings::bind_batches(m);
  acc::bind_session(m);
  acc::bindings::bind_plans(m);
  acc::bindings::bind_capture(m);
  acc::bindings::bind_debugging(m);
  acc::bindings::bind_distributed(m);
  acc::bindings::bind_dlpack(m);
}
