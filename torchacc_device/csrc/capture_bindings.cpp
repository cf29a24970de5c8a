#include "torchacc_device/csrc/capture_bindings.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "lazy/capture/step.h"
#include "lazy/record/storage.h"
#include "torchacc_device/csrc/guarded.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

bool has_acc_storage(const at::Tensor& tensor) {
  return runtime::on_acc(tensor) && tensor.has_storage();
}

std::string text_of(py::handle value) { return py::repr(value).cast<std::string>(); }

// A step, and what of the Python around it has to stay as it was.
class PyStep {
 public:
  explicit PyStep(const py::tuple& leaves, std::vector<std::string> names)
      : names_(std::move(names)) {
    ACC_CHECK(names_.size() == leaves.size());
    std::vector<std::string> tensors;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const bool tensor = THPVariable_Check(leaves[i].ptr());
      is_tensor_.push_back(tensor);
      spec_.push_back(tensor ? py::object(py::none()) : py::object(leaves[i]));
      if (tensor) tensors.push_back(names_[i]);
    }
    step_.name_arguments(std::move(tensors));
  }

  void begin(const py::tuple& leaves) {
    arguments_ = tensors_of(leaves);
    step_.begin(arguments_);
  }

  void end(const std::vector<at::Tensor>& results, bool last) {
    const std::vector<at::Tensor> arguments = std::exchange(arguments_, {});
    step_.end(arguments, results, last);
  }

  void cancel() {
    arguments_.clear();
    step_.cancel();
  }

  // The tensor under `key` has to stay the very object that it is, with its storage, and to want a
  // gradient, or not, as is said. Returns false for what is no tensor that the step uses.
  bool keep(const py::dict& owner, const py::object& key, const std::string& text,
            std::optional<bool> requires_grad) {
    PyObject* value = PyDict_GetItem(owner.ptr(), key.ptr());
    if (value == nullptr || !THPVariable_Check(value)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (!has_acc_storage(tensor) || !step_.touches(tensor).uses) return false;
    kept_.push_back({.owner = owner,
                     .key = key,
                     .value = value,
                     .storage = tensor.storage().unsafeGetStorageImpl(),
                     .requires_grad = requires_grad,
                     .text = text});
    return true;
  }

  // A tensor that the function may know without its arguments.
  void pin_arguments(const at::Tensor& tensor, const std::string& text) {
    if (has_acc_storage(tensor)) step_.pin_arguments(tensor, text);
  }

  // A gradient that the step reads has to stay where it is.
  void keep_gradient(const at::Tensor& of, const std::string& text) {
    const at::Tensor& grad = of.grad();
    if (!has_acc_storage(grad) || !step_.touches(grad).reads) return;
    gradients_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(of.getIntrusivePtr()),
                          grad.storage().unsafeGetStorageImpl(), text});
  }

  // What is no tensor has to stay equal.
  void keep_value(const py::dict& owner, const py::object& key, const std::string& text) {
    PyObject* value = PyDict_GetItem(owner.ptr(), key.ptr());
    if (value == nullptr) return;
    kept_.push_back({.owner = owner,
                     .key = key,
                     .value = value,
                     .held = py::reinterpret_borrow<py::object>(value),
                     .length = length_of(value),
                     .text = text});
  }

  // Counts the step's writes of a tensor, so that autograd notices them.
  void count_writes(const at::Tensor& tensor) {
    if (!has_acc_storage(tensor) || !step_.touches(tensor).changes) return;
    changed_.emplace_back(tensor.getIntrusivePtr());
  }

  std::vector<at::Tensor> replay(const py::tuple& leaves) {
    for (const Kept& kept : kept_) {
      PyObject* value = PyDict_GetItem(kept.owner.ptr(), kept.key.ptr());
      if (kept.storage == nullptr) {
        if (value != kept.value) check_equal(kept, value);
        ACC_CHECK(length_of(value) == kept.length, "[torchacc.capture] ", kept.text, " have ",
                  length_of(value), " entries and had ", kept.length,
                  " at capture. Capture the step again.");
        continue;
      }
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
    for (const Gradient& kept : gradients_) {
      const auto impl = kept.of.lock();
      if (!impl) continue;
      const at::Tensor& grad = at::Tensor(impl).grad();
      ACC_CHECK(has_acc_storage(grad) && grad.storage().unsafeGetStorageImpl() == kept.storage,
                "[torchacc.capture] ", kept.text,
                grad.defined() ? " is another tensor" : " is None",
                " and the step adds to the one at capture, which is gone from there. Zero it in "
                "place (zero_grad(set_to_none=False)), or zero it within the function.");
    }
    const std::vector<at::Tensor> arguments = tensors_of(leaves);
    struct Bump {  // whatever happens to the run
      PyStep& step;
      const std::vector<at::Tensor>& arguments;
      bool on = false;
      ~Bump() {
        if (on) step.bump(arguments);
      }
    } bump{*this, arguments};
    const py::gil_scoped_release release;
    return step_.replay(arguments, &bump.on);
  }

  std::vector<at::Tensor> take_results() { return step_.take_results(); }
  bool changes(const at::Tensor& tensor) const {
    return has_acc_storage(tensor) && step_.touches(tensor).changes;
  }
  bool uses(const at::Tensor& tensor) const {
    return has_acc_storage(tensor) && step_.touches(tensor).uses;
  }
  size_t operators() const { return step_.operators(); }
  bool some_stayed() const { return step_.some_stayed(); }

  // For the garbage collector: what is kept may well hold the step, which `model.step =
  // torchacc.capture(...)` makes a circle.
  int traverse(visitproc visit, void* arg) const {
    for (const py::object& leaf : spec_) Py_VISIT(leaf.ptr());
    for (const Kept& kept : kept_) {
      Py_VISIT(kept.owner.ptr());
      Py_VISIT(kept.key.ptr());
      Py_VISIT(kept.held.ptr());
    }
    return 0;
  }
  void clear() {
    // Taken out first: what dies may call back.
    const auto leaves = std::exchange(spec_, {});
    const auto kept = std::exchange(kept_, {});
  }

 private:
  struct Kept {
    py::dict owner;
    py::object key;
    PyObject* value;  // known by its address; `owner` keeps it, or has lost it
    const c10::StorageImpl* storage = nullptr;  // of a tensor
    std::optional<bool> requires_grad = {};
    py::object held = {};    // what is no tensor
    Py_ssize_t length = -1;  // of a list
    std::string text;
  };

  struct Gradient {
    c10::weak_intrusive_ptr<c10::TensorImpl> of;
    const c10::StorageImpl* storage;
    std::string text;
  };

  static Py_ssize_t length_of(PyObject* value) {
    return value != nullptr && PyList_Check(value) ? PyList_GET_SIZE(value) : -1;
  }

  // As Python's ==, but that what cannot be compared so (an array's answer is an array) is not.
  static bool are_equal(const py::object& a, py::handle b) {
    const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal > 0;
  }

  static void check_equal(const Kept& kept, PyObject* value) {
    // Containers are told by identity: what they hold is kept by itself.
    const bool container = PyDict_Check(kept.held.ptr()) || PyList_Check(kept.held.ptr());
    ACC_CHECK(value != nullptr && !container, "[torchacc.capture] ", kept.text,
              " is another object than at capture. Capture the step again.");
    const bool same = !THPVariable_Check(value) && are_equal(kept.held, value);
    ACC_CHECK(same, "[torchacc.capture] ", kept.text, " is ", text_of(value), " and was ",
              text_of(kept.held),
              " at capture, which a replay does not see. Make it a tensor on "
              "acc if it is to change, or capture the step again.");
  }

  // The tensors among the leaves, on acc; the others must be what they were.
  std::vector<at::Tensor> tensors_of(const py::tuple& leaves) const {
    ACC_CHECK(leaves.size() == spec_.size(), "[torchacc.capture] the step was captured with ",
              spec_.size(), " arguments and is called with ", leaves.size(),
              ". Capture another one for that.");
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < spec_.size(); ++i) {
      PyObject* leaf = leaves[i].ptr();
      if (is_tensor_[i]) {
        ACC_CHECK(THPVariable_Check(leaf), "[torchacc.capture] ", names_[i],
                  " was a tensor at capture and is ", text_of(leaf),
                  ". Capture another step for that.");
        const at::Tensor& tensor = THPVariable_Unpack(leaf);
        ACC_CHECK(has_acc_storage(tensor), "[torchacc.capture] ", names_[i], " is a tensor on ",
                  tensor.device(), ".");
        tensors.push_back(tensor);
        continue;
      }
      if (leaf == spec_[i].ptr()) continue;
      const bool same = !THPVariable_Check(leaf) && Py_TYPE(leaf) == Py_TYPE(spec_[i].ptr()) &&
                        are_equal(spec_[i], leaf);
      ACC_CHECK(same, "[torchacc.capture] ", names_[i], " is ", text_of(leaf), " and was ",
                text_of(spec_[i]),
                " at capture. What is no tensor is part of the "
                "step: pass a tensor, or capture another step.");
    }
    return tensors;
  }

  void bump(const std::vector<at::Tensor>& arguments) {
    // An inference tensor has no version, and autograd nothing to do with it.
    const auto bump_one = [](c10::TensorImpl& impl) {
      if (!impl.is_inference()) impl.bump_version();
    };
    for (const auto& weak : changed_) {
      if (const auto impl = weak.lock()) bump_one(*impl);
    }
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (step_.changes_argument(k)) bump_one(*arguments[k].unsafeGetTensorImpl());
    }
  }

  capture::Step step_;
  std::vector<std::string> names_;  // of the leaves
  std::vector<py::object> spec_;    // None where a tensor stands
  std::vector<bool> is_tensor_;
  std::vector<at::Tensor> arguments_;  // of the call being recorded
  std::vector<Kept> kept_;
  std::vector<Gradient> gradients_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> changed_;
};

void let_collect(PyHeapTypeObject* heap) {
  PyTypeObject& type = heap->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<PyStep&>(py::handle(self)).traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<PyStep&>(py::handle(self)).clear();
    return 0;
  };
}

// All in one call, in which no other thread runs: while a tuple is on a list of all objects,
// CPython refuses the thread that makes it to resize it.
py::list living(const std::vector<py::type>& kinds) {
  py::list found;
  const py::object get_objects = py::module_::import("gc").attr("get_objects");
  const py::list objects = get_objects();
  for (const py::handle object : objects) {
    const auto is = [object](const py::type& kind) {
      return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(kind.ptr()));
    };
    if (std::any_of(kinds.begin(), kinds.end(), is)) found.append(object);
  }
  return found;
}

}  // namespace

void bind_capture(py::module_& m) {
  m.def("living", guarded(living), py::arg("kinds"),
        "The objects of these types and of those derived from them that the collector knows.");
  py::class_<PyStep>(m, "CapturedStep", py::custom_type_setup(let_collect),
                     "A step of a program that is recorded and replayed.")
      .def(py::init<const py::tuple&, std::vector<std::string>>(), py::arg("leaves"),
           py::arg("names"), "A step with arguments like these, and what errors call them.")
      .def("begin", guarded([](PyStep& self, const py::tuple& leaves) { self.begin(leaves); }),
           py::arg("leaves"), "Begins to record a call with these arguments.")
      .def("end", guarded([](PyStep& self, const std::vector<at::Tensor>& results, bool last) {
             self.end(results, last);
           }),
           py::arg("results"), py::arg("last"),
           "Ends the call; after the last one, throws when it cannot be replayed.")
      .def("cancel", guarded([](PyStep& self) { self.cancel(); }), "Ends a call that raised.")
      .def("take_results", guarded([](PyStep& self) { return self.take_results(); }),
           "The results of the last recorded call.")
      .def("keep",
           guarded([](PyStep& self, const py::dict& owner, const py::object& key,
                      const std::string& text, std::optional<bool> requires_grad) {
             return self.keep(owner, key, text, requires_grad);
           }),
           py::arg("owner"), py::arg("key"), py::arg("text"), py::arg("requires_grad") = py::none(),
           "From now on, the tensor owner[key] has to stay what it is, and requires_grad as given; "
           "False if the step does not use it.")
      .def("keep_gradient",
           guarded([](PyStep& self, const at::Tensor& of, const std::string& text) {
             self.keep_gradient(of, text);
           }),
           py::arg("of"), py::arg("text"), "The same for the gradient of a tensor, if it is read.")
      .def("keep_value",
           guarded([](PyStep& self, const py::dict& owner, const py::object& key,
                      const std::string& text) { self.keep_value(owner, key, text); }),
           py::arg("owner"), py::arg("key"), py::arg("text"),
           "The same for what is no tensor: it has to stay equal, a dict or list the very object.")
      .def("pin_arguments",
           guarded([](PyStep& self, const at::Tensor& tensor, const std::string& text) {
             self.pin_arguments(tensor, text);
           }),
           py::arg("tensor"), py::arg("text"),
           "Arguments that were in this tensor's memory in both calls have to stay there.")
      .def("count_writes",
           guarded([](PyStep& self, const at::Tensor& tensor) { self.count_writes(tensor); }),
           py::arg("tensor"), "Counts the step's writes of a tensor for autograd.")
      .def("uses", guarded([](PyStep& self, const at::Tensor& t) { return self.uses(t); }),
           py::arg("tensor"), "Whether the step reads or makes what the tensor holds.")
      .def("changes", guarded([](PyStep& self, const at::Tensor& t) { return self.changes(t); }),
           py::arg("tensor"), "Whether the step writes it.")
      .def("replay",
           guarded([](PyStep& self, const py::tuple& leaves) { return self.replay(leaves); }),
           py::arg("leaves"), "Runs the step; the tensors that it returns.")
      .def_property_readonly("some_stayed", &PyStep::some_stayed,
                             "Whether an argument had one memory in both calls compared.")
      .def_property_readonly("operators", &PyStep::operators);
}

}  // namespace acc::bindings
