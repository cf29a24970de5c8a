#include "torchacc_device/csrc/batch_bindings.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/aten/fallback.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/fork.h"
#include "torchacc_device/csrc/guarded.h"

// On a host the memory of the CPU is the device's: a batch that nobody else has moves there as it
// lies.
namespace acc::bindings {
namespace {

namespace py = pybind11;

// Nobody else has a reference, and so nobody can tell whether the object changes.
bool is_only_here(const PyObject* object) { return Py_REFCNT(object) == 1; }

bool holds_no_tensor(PyObject* object) {
  return object == Py_None || PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object);
}

// All of a block of the CPU's own allocator, and no part of it that nobody uses any more: what lies
// in memory that is mapped, shared, pinned or another library's can be changed by others without a
// reference to the tensor or its storage.
bool has_memory_of_its_own(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  return storage.use_count() == 1 && storage.nbytes() == tensor.nbytes() &&
         storage.data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
}

// Torch 2.13 has no names of dimensions any more.
template <class Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) {
    return tensor.has_names();
  } else {
    return false;
  }
}

// Also: as it lies it is what a copy on the device would be.
bool can_be_taken(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.is_cpu() && tensor.layout() == c10::kStrided &&
         !tensor.is_nested() && !tensor.is_quantized() && has_memory_of_its_own(tensor) &&
         tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         !tensor.requires_grad() && !tensor._fw_grad(/*level=*/0).defined() && !tensor.is_conj() &&
         !tensor.is_neg() && !has_names(tensor);
}

// Python's limit for lists in lists: that of calls, or from 3.12 on of calls in C.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" in a batch") != 0) throw py::error_already_set();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

// Goes through a batch, whose containers may be seen by nobody else either.
class Taking {
 public:
  explicit Taking(c10::Device device) : device_(device) {}

  // Whether no tensor is anywhere else than on the device.
  bool all() const { return all_; }

  // Nobody but the caller has a reference to `container`.
  void take_items(PyObject* container) {
    if (PyList_CheckExact(container)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i) {
        py::object made = taken_over(PyList_GET_ITEM(container, i));
        if (made) PyList_SetItem(container, i, made.release().ptr());
      }
    } else if (PyTuple_CheckExact(container)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(container); ++i) {
        py::object made = taken_over(PyTuple_GET_ITEM(container, i));
        if (made) PyTuple_SetItem(container, i, made.release().ptr());
      }
    } else if (PyDict_CheckExact(container)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      // Values may be exchanged while a dict is gone through, keys may not.
      for (Py_ssize_t at = 0; PyDict_Next(container, &at, &key, &value) != 0;) {
        const py::object made = taken_over(value);
        if (made && PyDict_SetItem(container, key, made.ptr()) != 0) throw py::error_already_set();
      }
    } else {
      all_ = false;  // it may hold anything
    }
  }

 private:
  // What stands for an object of the batch from now on; null if it stays.
  py::object taken_over(PyObject* object) {
    if (THPVariable_CheckExact(object)) {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (tensor.device() == device_) return {};
      if (is_only_here(object) && can_be_taken(tensor)) {
        auto made = py::reinterpret_steal<py::object>(
            THPVariable_Wrap(aten::wrap(tensor, device_.index())));
        if (!made) throw py::error_already_set();
        return made;
      }
      all_ = false;
    } else if (!holds_no_tensor(object)) {
      if (is_only_here(object)) {
        const Deeper deeper;
        take_items(object);
      } else {
        all_ = false;
      }
    }
    return {};
  }

  const c10::Device device_;
  bool all_ = true;
};

bool take_over(const py::list& held, c10::DeviceIndex device) {
  runtime::check_device(device);
  if (!runtime::on_host()) return false;
  runtime::note_use();
  Taking taking(runtime::acc_device(device));
  taking.take_items(held.ptr());
  return taking.all();
}

}  // namespace

void bind_batches(py::module_& m) {
  m.def("take_over", guarded(&take_over), py::arg("held"), py::arg("device"),
        "Where the device is a host: puts in the place of each tensor of the CPU in `held`, a list "
        "of batches, one of the device that has its memory, if nobody else can see that memory. "
        "Goes into lists, tuples and dicts; what others have a reference to stays as it is. "
        "Returns whether no tensor is anywhere else than on the device now, as far as that is "
        "known.");
}

}  // namespace acc::bindings
