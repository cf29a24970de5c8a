#include "torchacc_device/csrc/dlpack_bindings.h"

#include <ATen/DLConvertor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "lazy/session/session.h"
#include "torchacc_device/csrc/guarded.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

constexpr const char* kCapsule = "dlpack_exchange_api";

// torch's functions, which give out the address of a tensor as it is.
const DLPackExchangeAPI* of_torch = nullptr;

// Null: no acc tensor, or a wrapper around others, which has no memory of its own.
const at::Tensor* with_acc_memory(void* object) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrappers(
      {Key::Python, Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Functionalize});
  if (!THPVariable_Check(static_cast<PyObject*>(object))) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
  const bool has = runtime::on_acc(tensor) && tensor.layout() == at::kStrided &&
                   !tensor.key_set().has_any(kWrappers);
  return has ? &tensor : nullptr;
}

int managed(void* object, DLManagedTensorVersioned** out) {
  const at::Tensor* tensor = with_acc_memory(object);
  if (tensor == nullptr) return of_torch->managed_tensor_from_py_object_no_sync(object, out);
  HANDLE_TH_ERRORS
  const py::gil_scoped_release release;
  *out = at::toDLPackVersioned(session::alias(*tensor, record::FlushReason::kPointer));
  session::share(*tensor);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

// For a call during which the tensor lives, as does its memory.
int borrowed(void* object, DLTensor* out) {
  const at::Tensor* tensor = with_acc_memory(object);
  if (tensor == nullptr) return of_torch->dltensor_from_py_object_no_sync(object, out);
  HANDLE_TH_ERRORS
  const py::gil_scoped_release release;
  at::toDLPackNonOwning(session::alias(*tensor, record::FlushReason::kPointer), out);
  // Those of the alias go with it.
  out->shape = const_cast<int64_t*>(tensor->sizes().data());
  out->strides = const_cast<int64_t*>(tensor->strides().data());
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

py::capsule exchange_api(const py::capsule& original) {
  static DLPackExchangeAPI api;  // libraries may keep the address for good
  of_torch = original.get_pointer<const DLPackExchangeAPI>();
  api = *of_torch;
  api.managed_tensor_from_py_object_no_sync = &managed;
  api.dltensor_from_py_object_no_sync = &borrowed;
  return py::capsule(&api, kCapsule);
}

}  // namespace

void bind_dlpack(py::module_& m) {
  m.def("dlpack_exchange_api", guarded(exchange_api), py::arg("original"),
        "torch's table of functions for libraries that exchange tensors from C "
        "(__dlpack_c_exchange_api__), which gives out the memory of acc tensors.");
}

}  // namespace acc::bindings
