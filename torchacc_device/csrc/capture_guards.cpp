#include "torchacc_device/csrc/capture_guards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <utility>

#include "csrc/base/check.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

Py_ssize_t length_of(PyObject* value) {
  return value != nullptr && PyList_Check(value) ? PyList_GET_SIZE(value) : -1;
}

// What a weak reference refers to, which something else keeps; null when it is gone.
PyObject* referent(const py::object& weak) {
  const auto object = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(weak.ptr()));
  return object && !object.is_none() ? object.ptr() : nullptr;
}

bool is_array(py::handle object) {
  return std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") == 0;
}

bool hold_the_same(const at::Tensor& a, const at::Tensor& b) {
  if (!a.device().is_cpu() || a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return false;
  }
  const at::Tensor left = a.contiguous();
  return left.numel() == 0 ||
         std::memcmp(left.const_data_ptr(), b.const_data_ptr(), left.nbytes()) == 0;
}

void fail_changed(const std::string& text, py::handle is, py::handle was) {
  ACC_FAIL("[torchacc.capture] ", text, " is ", text_of(is), " and was ", text_of(was),
           " at capture, which a replay does not see. Make it a tensor on "
           "acc if it is to change, or capture the step again.");
}

}  // namespace

std::string text_of(py::handle value) { return py::repr(value).cast<std::string>(); }

bool are_equal(py::handle a, py::handle b) {
  try {
    // The answer of numpy's arrays to == is an array.
    if (is_array(a) && is_array(b)) {
      return py::module_::import("numpy").attr("array_equal")(a, b).cast<bool>();
    }
    return a.equal(b);
  } catch (const py::error_already_set&) {
    return false;
  }
}

void Guards::keep_tensor(const py::dict& owner, const py::object& key, const std::string& text,
                         std::optional<bool> requires_grad) {
  PyObject* value = PyDict_GetItem(owner.ptr(), key.ptr());
  kept_.push_back({.owner = owner,
                   .key = key,
                   .value = value,
                   .storage = THPVariable_Unpack(value).storage().unsafeGetStorageImpl(),
                   .requires_grad = requires_grad,
                   .text = text});
}

void Guards::keep_value(const py::object& owner, const py::object& key, const std::string& text) {
  const bool holds = PyDict_Check(owner.ptr()) || PyCell_Check(owner.ptr());
  Kept kept{
      .owner = holds ? owner : py::weakref(owner), .key = key, .value = nullptr, .text = text};
  kept.value = value_now(kept);
  if (kept.value == nullptr) return;
  kept.held = py::reinterpret_borrow<py::object>(kept.value);
  kept.length = length_of(kept.value);
  kept_.push_back(std::move(kept));
}

void Guards::keep_object(const py::dict& owner, const py::object& key, const std::string& text) {
  PyObject* value = PyDict_GetItem(owner.ptr(), key.ptr());
  if (value == nullptr) return;
  kept_.push_back(
      {.owner = owner, .key = key, .value = value, .weak = py::weakref(value), .text = text});
}

void Guards::keep_attribute(const py::object& owner, const py::object& name,
                            const std::string& text) {
  Kept kept{.owner = py::weakref(owner), .key = name, .value = nullptr, .text = text};
  kept.value = value_now(kept);
  if (kept.value == nullptr) return;
  kept.weak = py::weakref(kept.value);
  kept_.push_back(std::move(kept));
}

void Guards::keep_alive(const py::object& object, const std::string& text) {
  living_.push_back({py::weakref(object), text});
}

void Guards::keep_contents(const at::Tensor& tensor, const std::string& text) {
  contents_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                       tensor.detach().clone(at::MemoryFormat::Contiguous), text});
}

void Guards::check() const {
  for (const Living& living : living_) {
    ACC_CHECK(referent(living.weak) != nullptr, "[torchacc.capture] ", living.text,
              " is gone, and a replay would go on with its tensors. Capture the step again.");
  }
  for (const Kept& kept : kept_) {
    PyObject* value = value_now(kept);
    if (kept.storage != nullptr) {
      check_tensor(kept, value);
    } else if (kept.weak) {
      ACC_CHECK(value == kept.value && referent(kept.weak) == value, "[torchacc.capture] ",
                kept.text, " is another object than at capture. Capture the step again.");
    } else {
      if (value != kept.value) check_equal(kept, value);
      ACC_CHECK(length_of(value) == kept.length, "[torchacc.capture] ", kept.text, " have ",
                length_of(value), " entries and had ", kept.length,
                " at capture. Capture the step again.");
    }
  }
  for (const Contents& kept : contents_) {
    auto impl = kept.of.lock();
    if (!impl) continue;
    const at::Tensor tensor(std::move(impl));
    if (hold_the_same(tensor, kept.was)) continue;
    fail_changed(kept.text, py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)),
                 py::reinterpret_steal<py::object>(THPVariable_Wrap(kept.was)));
  }
}

// Null when there is none.
PyObject* Guards::value_now(const Kept& kept) {
  if (PyDict_Check(kept.owner.ptr())) return PyDict_GetItem(kept.owner.ptr(), kept.key.ptr());
  if (PyCell_Check(kept.owner.ptr())) return PyCell_GET(kept.owner.ptr());
  PyObject* owner = referent(kept.owner);
  if (owner == nullptr) return nullptr;
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner, nullptr));
  if (attributes) return PyDict_GetItem(attributes.ptr(), kept.key.ptr());
  PyErr_Clear();
  return nullptr;
}

void Guards::check_tensor(const Kept& kept, PyObject* value) {
  ACC_CHECK(value == kept.value, "[torchacc.capture] ", kept.text,
            " is another object than at capture. Capture the step again.");
  const at::Tensor& tensor = THPVariable_Unpack(value);
  ACC_CHECK(tensor.storage().unsafeGetStorageImpl() == kept.storage, "[torchacc.capture] ",
            kept.text, " has another storage than at capture (on ", tensor.device(),
            " now). Capture the step again, after it was moved or its data was replaced.");
  ACC_CHECK(!kept.requires_grad.has_value() || tensor.requires_grad() == *kept.requires_grad,
            "[torchacc.capture] requires_grad of ", kept.text,
            tensor.requires_grad() ? " is True and was False" : " is False and was True",
            " at capture. Capture the step again.");
}

void Guards::check_equal(const Kept& kept, PyObject* value) {
  // Containers are told by identity: what they hold is kept by itself.
  const bool container = PyDict_Check(kept.held.ptr()) || PyList_Check(kept.held.ptr());
  ACC_CHECK(value != nullptr && !container, "[torchacc.capture] ", kept.text,
            " is another object than at capture. Capture the step again.");
  if (THPVariable_Check(value) || !are_equal(kept.held, value)) {
    fail_changed(kept.text, value, kept.held);
  }
}

int Guards::traverse(visitproc visit, void* arg) const {
  for (const Kept& kept : kept_) {
    Py_VISIT(kept.owner.ptr());
    Py_VISIT(kept.key.ptr());
    Py_VISIT(kept.held.ptr());
    Py_VISIT(kept.weak.ptr());
  }
  for (const Living& living : living_) Py_VISIT(living.weak.ptr());
  return 0;
}

void Guards::clear() {
  // Taken out first: what dies may call back.
  const auto kept = std::exchange(kept_, {});
  const auto living = std::exchange(living_, {});
  const auto contents = std::exchange(contents_, {});
}

}  // namespace acc::bindings
