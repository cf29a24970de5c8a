#include "torchacc_device/csrc/capture_guards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "lazy/record/storage.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

// Tensors up to this size are compared always: a write that autograd does not count (through an
// array of numpy with the same memory) is noticed there, too.
constexpr size_t kFewBytes = 4096;

// What a weak reference refers to; none when it is gone.
py::object referent(const py::object& weak) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(weak.ptr(), &object) < 0) PyErr_Clear();
  return py::reinterpret_steal<py::object>(object);
#else
  PyObject* object = PyWeakref_GetObject(weak.ptr());
  return object == Py_None ? py::object() : py::reinterpret_borrow<py::object>(object);
#endif
}

bool is_array(py::handle object) {
  return std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") == 0;
}

Py_ssize_t length_of(const py::object& value) {
  PyObject* container = value.ptr();
  if (container == nullptr) return -1;
  if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
  if (PyList_Check(container)) return PyList_GET_SIZE(container);
  return PyTuple_Check(container) ? PyTuple_GET_SIZE(container) : -1;
}

bool is_one(const py::object& value, const c10::weak_intrusive_ptr<c10::TensorImpl>& tensor) {
  return value && THPVariable_Check(value.ptr()) &&
         THPVariable_Unpack(value.ptr()).unsafeGetTensorImpl() == tensor._unsafe_get_target();
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

// What a dict has under a tensor, without asking this for its hash. `*position`: where it was.
py::object value_of_tensor(PyObject* dict, const PyObject* tensor, Py_ssize_t* position) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t next = *position;
  if (PyDict_Next(dict, &next, &key, &value) != 0 && key == tensor) {
    return py::reinterpret_borrow<py::object>(value);
  }
  Py_ssize_t at = 0;
  for (next = 0; PyDict_Next(dict, &next, &key, &value) != 0; at = next) {
    if (key != tensor) continue;
    *position = at;
    return py::reinterpret_borrow<py::object>(value);
  }
  return {};
}

std::string head_of(const Py_buffer& view) {
  std::string head = view.format == nullptr ? "" : view.format;
  head += " of [";
  for (int i = 0; i < view.ndim; ++i) head += std::to_string(view.shape[i]) + ",";
  return head;
}

// What an object has as its own attributes; none of what has none.
py::object attributes_of(const py::object& object) {
  if (PyType_Check(object.ptr())) {
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyTypeObject*>(object.ptr())->tp_dict);
  }
  auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (!attributes) PyErr_Clear();
  return attributes;
}

// Whether plain values and what is in tuples of them are of the same types.
bool are_of_one_type(py::handle a, py::handle b) {
  if (Py_TYPE(a.ptr()) != Py_TYPE(b.ptr())) return false;
  if (!PyTuple_Check(a.ptr())) return true;
  const Py_ssize_t size = PyTuple_GET_SIZE(a.ptr());
  if (PyTuple_GET_SIZE(b.ptr()) != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!are_of_one_type(PyTuple_GET_ITEM(a.ptr(), i), PyTuple_GET_ITEM(b.ptr(), i))) return false;
  }
  return true;
}

// A number that can change as a tensor does; not what decides, or a member of an enum.
bool is_number(py::handle value) {
  PyObject* object = value.ptr();
  return PyLong_Check(object) ? PyLong_CheckExact(object) : PyNumber_Check(object) != 0;
}

// `value` is nothing where it was found.
[[noreturn]] void fail_another(const std::string& text, const py::object& value) {
  ACC_FAIL("[torchacc.capture] ", text,
           value ? " is another object than at capture."
                 : " is gone from where it was at capture. Put it back there, or",
           value ? " Capture" : " capture", " the step again.");
}

// `can_be_tensor`: what it was, with another value each time.
[[noreturn]] void fail_changed(const std::string& text, const py::object& is,
                               const std::string& was, bool can_be_tensor) {
  if (!is) fail_another(text, is);
  ACC_FAIL("[torchacc.capture] ", text, " is ", text_of(is), " and was ", was,
           " at capture, which a replay does not see. ",
           can_be_tensor ? "Make it a tensor on acc if it is to change, or capture the step again."
                         : "Capture one step for each value, or capture the step again.");
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

std::optional<std::string> contents_of(PyObject* object) {
  if (!PyObject_CheckBuffer(object) || PyBytes_Check(object)) return std::nullopt;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::string contents = head_of(view);
  const size_t begin = contents.size();
  contents.resize(begin + static_cast<size_t>(view.len));
  const int failed = PyBuffer_ToContiguous(contents.data() + begin, &view, view.len, 'C');
  PyBuffer_Release(&view);
  if (failed == 0) return contents;
  PyErr_Clear();
  return std::nullopt;
}

bool holds(PyObject* object, const std::string& contents) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool contiguous = PyBuffer_IsContiguous(&view, 'C') != 0;
  const std::string head = head_of(view);
  const auto size = static_cast<size_t>(view.len);
  const bool same = contiguous && contents.size() == head.size() + size &&
                    contents.starts_with(head) &&
                    (size == 0 || std::memcmp(contents.data() + head.size(), view.buf, size) == 0);
  PyBuffer_Release(&view);
  return contiguous ? same : contents_of(object) == contents;
}

bool hold_the_same(const at::Tensor& tensor, const at::Tensor& was) {
  if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided ||
      tensor.scalar_type() != was.scalar_type() || tensor.sizes() != was.sizes()) {
    return false;
  }
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  return plain.numel() == 0 ||
         std::memcmp(plain.const_data_ptr(), was.const_data_ptr(), plain.nbytes()) == 0;
}

bool has_acc_storage(const at::Tensor& tensor) {
  if (!runtime::on_acc(tensor)) return false;
  const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return dynamic_cast<const record::LazyStorage*>(storage) != nullptr &&
         tensor.layout() == c10::kStrided && !tensor.is_nested();
}

Guards::Key Guards::key_of(const py::object& within, const py::handle& key) {
  if (PyList_Check(within.ptr()) || PyTuple_Check(within.ptr())) {
    return {.object = {}, .index = key.cast<Py_ssize_t>()};
  }
  if (THPVariable_Check(key.ptr())) {
    return {.tensor = key.ptr()};
  }
  return {.object = py::reinterpret_borrow<py::object>(key)};
}

// None where there is none.
py::object Guards::member(const py::object& within, const Key& key) {
  PyObject* container = within.ptr();
  if (container == nullptr) return {};
  if (PyCell_Check(container)) {
    return py::reinterpret_steal<py::object>(PyCell_Get(container));
  }
  if (PyDict_Check(container)) {
    if (key.tensor != nullptr) return value_of_tensor(container, key.tensor, &key.position);
    if (!key.object) return {};
    PyObject* value = PyDict_GetItemWithError(container, key.object.ptr());
    if (value == nullptr) PyErr_Clear();
    return py::reinterpret_borrow<py::object>(value);
  }
  if (!PyList_Check(container) && !PyTuple_Check(container)) {
    return key.object ? member(attributes_of(within), key) : py::object();
  }
  if (key.index < 0 || key.index >= length_of(within)) return {};
  return py::reinterpret_borrow<py::object>(PyList_Check(container)
                                                ? PyList_GET_ITEM(container, key.index)
                                                : PyTuple_GET_ITEM(container, key.index));
}

// A dict, a cell, or what an object has as its attributes; none of an object that is gone.
std::optional<py::object> Guards::now(const Within& owner) {
  if (PyDict_Check(owner.owner.ptr()) || PyCell_Check(owner.owner.ptr())) return owner.owner;
  const py::object object = referent(owner.owner);
  if (!object) return std::nullopt;
  return attributes_of(object);
}

size_t Guards::add(Within within, const void* key, size_t in) {
  const auto [found, is_new] = known_.try_emplace({in, key}, within_.size());
  if (is_new) within_.push_back(std::move(within));
  return found->second;
}

std::optional<std::pair<Guards::Kept, py::object>> Guards::find(const py::object& owner,
                                                                const py::tuple& path,
                                                                const std::string& text) {
  constexpr size_t kNone = SIZE_MAX;
  const bool held = PyDict_Check(owner.ptr()) || PyCell_Check(owner.ptr());
  size_t in = add({.owner = held ? owner : py::object(py::weakref(owner))}, owner.ptr(), kNone);
  py::object within = now(within_[in]).value();
  for (size_t i = 0; within; ++i) {
    Key key = key_of(within, path[i]);
    py::object value = member(within, key);
    if (!value) break;
    if (i + 1 == path.size()) return std::pair(Kept{in, std::move(key), text}, std::move(value));
    const void* leads = key.index >= 0 ? reinterpret_cast<const void*>(key.index)
                                       : static_cast<const void*>(path[i].ptr());
    in = add({.in = in, .key = std::move(key)}, leads, in);
    within = std::move(value);
  }
  return std::nullopt;
}

Guards::Place Guards::place_of(const at::Tensor& tensor, std::optional<bool> requires_grad) {
  if (!has_acc_storage(tensor)) return {nullptr, {}, requires_grad};
  return {tensor.storage().unsafeGetStorageImpl(), capture::geometry_of(tensor), requires_grad};
}

void Guards::keep_tensor(const py::object& owner, const py::tuple& path, const std::string& text,
                         std::optional<bool> requires_grad, bool or_alike) {
  auto found = find(owner, path, text);
  if (!found.has_value() || !THPVariable_Check(found->second.ptr())) return;
  const at::Tensor& tensor = THPVariable_Unpack(found->second.ptr());
  tensors_.push_back(
      {std::move(found->first), found->second.ptr(), place_of(tensor, requires_grad), or_alike});
}

void Guards::keep_value(const py::object& owner, const py::tuple& path, const std::string& text,
                        bool exact) {
  if (auto found = find(owner, path, text)) {
    values_.push_back({std::move(found->first), std::move(found->second), exact});
  }
}

void Guards::keep_object(const py::object& owner, const py::tuple& path, const std::string& text) {
  auto found = find(owner, path, text);
  if (!found.has_value()) return;
  const py::object& value = found->second;
  KeptObject kept;
  static_cast<Kept&>(kept) = std::move(found->first);
  if (THPVariable_Check(value.ptr())) {
    kept.tensor = value.ptr();
  } else {
    kept.weak = value.is_none() ? value : py::object(py::weakref(value));
  }
  objects_.push_back(std::move(kept));
}

void Guards::keep_length(const py::object& owner, const py::tuple& path, const std::string& text) {
  auto found = find(owner, path, text);
  if (!found.has_value()) return;
  const Py_ssize_t length = length_of(found->second);
  if (length >= 0) lengths_.push_back({std::move(found->first), length});
}

void Guards::keep_contents(const py::object& owner, const py::tuple& path,
                           const std::string& text) {
  auto found = find(owner, path, text);
  if (!found.has_value()) return;
  const py::object& value = found->second;
  KeptContents kept;
  static_cast<Kept&>(kept) = std::move(found->first);
  if (THPVariable_Check(value.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided || tensor.is_nested()) return;
    kept.tensor = WeakTensor(tensor.getIntrusivePtr());
    kept.version = version_of(tensor);
    kept.data = tensor.const_data_ptr();
    if (tensor.nbytes() <= kMostBytes) {
      kept.was = tensor.detach().clone(at::MemoryFormat::Contiguous);
    }
  } else {
    if (value.attr("nbytes").cast<size_t>() <= kMostBytes) {
      kept.contents = contents_of(value.ptr());
    }
    if (kept.contents.has_value()) {
      kept.is = py::type::of(value);
      kept.was_text = text_of(value);
    } else {
      kept.is = py::weakref(value);
    }
  }
  contents_.push_back(std::move(kept));
}

void Guards::keep_answer(const py::object& owner, const py::object& name, const std::string& text) {
  answers_.push_back({py::weakref(owner), name, owner.attr(name), text});
}

void Guards::keep_place(const at::Tensor& tensor, const std::string& text,
                        std::optional<bool> requires_grad) {
  places_.push_back({WeakTensor(tensor.getIntrusivePtr()), place_of(tensor, requires_grad), text});
}

void Guards::keep_alive(const py::object& object, const std::string& text) {
  living_.push_back({py::weakref(object), text});
}

void Guards::check() {
  for (const Living& living : living_) {
    ACC_CHECK(referent(living.weak), "[torchacc.capture] ", living.text,
              " is gone, and a replay would go on with its tensors. Capture the step again.");
  }
  // None where the owner is gone, and with it what was found there.
  std::vector<std::optional<py::object>> within;
  within.reserve(within_.size());
  for (const Within& each : within_) {
    if (each.owner) {
      within.push_back(now(each));
    } else {
      const auto& in = within[each.in];
      within.push_back(in.has_value() ? std::optional(member(*in, each.key)) : std::nullopt);
    }
  }
  const auto check_all = [&within](auto& all, const auto& check_one) {
    for (auto& kept : all) {
      if (const auto& in = within[kept.in]) check_one(kept, member(*in, kept.key));
    }
  };
  check_all(tensors_, &check_tensor);
  check_all(objects_, &check_object);
  check_all(lengths_, &check_length);
  check_all(values_, &check_value);
  check_all(contents_, &check_contents);
  for (const Answer& kept : answers_) {
    const py::object object = referent(kept.weak);
    if (!object) continue;
    const py::object answer = object.attr(kept.name);
    if (!are_equal(kept.value, answer)) {
      fail_changed(kept.text, answer, text_of(kept.value), /*can_be_tensor=*/false);
    }
  }
  for (const KeptPlace& kept : places_) {
    if (auto impl = kept.tensor.lock()) {
      check_place(at::Tensor(std::move(impl)), kept.place, kept.text);
    }
  }
}

void Guards::check_geometry(const at::Tensor& tensor, const Place& place, const std::string& text) {
  ACC_CHECK(tensor.storage().unsafeGetStorageImpl() == place.storage, "[torchacc.capture] ", text,
            " has another storage than at capture (on ", tensor.device(),
            " now). Capture the step again, after it was moved or its data was replaced.");
  const capture::Geometry& was = place.geometry;
  ACC_CHECK(
      tensor.storage_offset() == was.offset && tensor.sizes() == c10::IntArrayRef(was.sizes) &&
          tensor.strides() == c10::IntArrayRef(was.strides) && tensor.scalar_type() == was.dtype &&
          tensor.is_conj() == was.conj && tensor.is_neg() == was.neg,
      "[torchacc.capture] ", text,
      " lies otherwise in its storage than at capture: ", tensor.scalar_type(), " of sizes ",
      tensor.sizes(), " and strides ", tensor.strides(), " at ", tensor.storage_offset(),
      ", and was ", was.dtype, " of ", c10::IntArrayRef(was.sizes), " and ",
      c10::IntArrayRef(was.strides), " at ", was.offset,
      ". Capture the step again, after its data was replaced.");
}

void Guards::check_place(const at::Tensor& tensor, const Place& place, const std::string& text) {
  if (place.storage != nullptr) check_geometry(tensor, place, text);
  ACC_CHECK(!place.requires_grad.has_value() || tensor.requires_grad() == *place.requires_grad,
            "[torchacc.capture] requires_grad of ", text,
            tensor.requires_grad() ? " is True and was False" : " is False and was True",
            " at capture. Capture the step again.");
}

void Guards::check_tensor(const KeptTensor& kept, const py::object& value) {
  if (value.ptr() != kept.tensor) {
    // A view that the program makes anew each time.
    const bool alike =
        kept.or_alike && value && THPVariable_Check(value.ptr()) &&
        has_acc_storage(THPVariable_Unpack(value.ptr())) &&
        THPVariable_Unpack(value.ptr()).storage().unsafeGetStorageImpl() == kept.place.storage;
    if (!alike) fail_another(kept.text, value);
  }
  check_place(THPVariable_Unpack(value.ptr()), kept.place, kept.text);
}

void Guards::check_object(const KeptObject& kept, const py::object& value) {
  if (kept.tensor != nullptr) {
    if (value.ptr() != kept.tensor) fail_another(kept.text, value);
    return;
  }
  const bool none = kept.weak.is_none();
  if (!value || !value.is(none ? kept.weak : referent(kept.weak))) fail_another(kept.text, value);
}

void Guards::check_length(const KeptLength& kept, const py::object& value) {
  const Py_ssize_t length = length_of(value);
  if (length < 0) fail_another(kept.text, value);
  ACC_CHECK(length == kept.length, "[torchacc.capture] ", kept.text, " have ", length,
            " entries and had ", kept.length, " at capture. Capture the step again.");
}

void Guards::check_value(const KeptValue& kept, const py::object& value) {
  if (value.is(kept.value)) return;
  if (value && !THPVariable_Check(value.ptr()) && are_equal(kept.value, value) &&
      (!kept.exact || are_of_one_type(kept.value, value))) {
    return;
  }
  fail_changed(kept.text, value, text_of(kept.value), is_number(kept.value));
}

void Guards::check_contents(KeptContents& kept, const py::object& value) {
  if (kept.contents.has_value()) {
    if (value && py::type::handle_of(value).is(kept.is) && holds(value.ptr(), *kept.contents)) {
      return;
    }
    fail_changed(kept.text, value, kept.was_text, /*can_be_tensor=*/true);
  }
  if (kept.is) {
    if (!value || !value.is(referent(kept.is))) fail_another(kept.text, value);
    return;
  }
  const bool same = is_one(value, kept.tensor);
  if (!same && (!value || !THPVariable_Check(value.ptr()))) {
    if (kept.was.defined()) {
      fail_changed(kept.text, value,
                   text_of(py::reinterpret_steal<py::object>(THPVariable_Wrap(kept.was))),
                   /*can_be_tensor=*/true);
    }
    fail_another(kept.text, value);
  }
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
  const bool unwritten = same && !tensor.is_inference() && version_of(tensor) == kept.version &&
                         tensor.const_data_ptr() == kept.data;
  if (!kept.was.defined()) {
    if (!same) fail_another(kept.text, value);
    ACC_CHECK(unwritten || tensor.is_inference(), "[torchacc.capture] ", kept.text,
              " was written since the capture, and with ", tensor.nbytes(),
              " bytes it is too large to be compared. Pass it as an argument, make it a tensor on "
              "acc, or capture the step again.");
    return;
  }
  if (unwritten && kept.was.nbytes() > kFewBytes) return;
  if (!hold_the_same(tensor, kept.was)) {
    fail_changed(kept.text, value,
                 text_of(py::reinterpret_steal<py::object>(THPVariable_Wrap(kept.was))),
                 /*can_be_tensor=*/true);
  }
  kept.tensor = WeakTensor(tensor.getIntrusivePtr());
  kept.version = version_of(tensor);
  kept.data = tensor.const_data_ptr();
}

int Guards::traverse(visitproc visit, void* arg) const {
  const auto visit_all = [&](const auto& all) {
    for (const Kept& kept : all) Py_VISIT(kept.key.object.ptr());
    return 0;
  };
  for (const Within& each : within_) {
    Py_VISIT(each.owner.ptr());
    Py_VISIT(each.key.object.ptr());
  }
  for (const KeptValue& kept : values_) Py_VISIT(kept.value.ptr());
  for (const KeptObject& kept : objects_) Py_VISIT(kept.weak.ptr());
  for (const KeptContents& kept : contents_) Py_VISIT(kept.is.ptr());
  for (const Answer& kept : answers_) {
    Py_VISIT(kept.weak.ptr());
    Py_VISIT(kept.name.ptr());
    Py_VISIT(kept.value.ptr());
  }
  for (const Living& living : living_) Py_VISIT(living.weak.ptr());
  for (const int stop : {visit_all(tensors_), visit_all(values_), visit_all(objects_),
                         visit_all(lengths_), visit_all(contents_)}) {
    if (stop != 0) return stop;
  }
  return 0;
}

void Guards::clear() {
  // Taken out first: what dies may call back.
  const Guards taken = std::exchange(*this, Guards());
}

}  // namespace acc::bindings
