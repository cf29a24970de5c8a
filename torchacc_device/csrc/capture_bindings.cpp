#include "torchacc_device/csrc/capture_bindings.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "lazy/capture/step.h"
#include "lazy/record/storage.h"
#include "torchacc_device/csrc/capture_guards.h"
#include "torchacc_device/csrc/guarded.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

// Why a tensor is none that a step can take or return.
std::string unfit_text(py::handle object, const at::Tensor& tensor) {
  if (!runtime::on_acc(tensor)) return base::concat(" is a tensor on ", tensor.device(), ".");
  return base::concat(
      " is a ", py::type::handle_of(object).attr("__name__").cast<std::string>(), " of layout ",
      tensor.layout(), " on ", tensor.device(),
      ", which has no memory of its own there: it is made of other tensors. Take and return those "
      "(to_local() of a DTensor, values() of a nested or sparse tensor).");
}

// A step, and what of the Python around it has to stay as it was.
class PyStep {
 public:
  explicit PyStep(const py::tuple& leaves, std::vector<std::string> names)
      : names_(std::move(names)) {
    ACC_CHECK(names_.size() == leaves.size());
    std::vector<std::string> tensors;
    for (size_t i = 0; i < leaves.size(); ++i) {
      Leaf& leaf = leaves_.emplace_back();
      leaf.is_tensor = THPVariable_Check(leaves[i].ptr());
      if (leaf.is_tensor) {
        tensors.push_back(names_[i]);
        continue;
      }
      leaf.value = leaves[i];
      leaf.contents = contents_of(leaf.value.ptr());
      if (!leaf.contents.has_value()) continue;
      leaf.text = text_of(leaf.value);
      leaf.value = py::type::of(leaf.value);
    }
    step_.name_arguments(std::move(tensors));
  }

  void begin(const py::tuple& leaves) {
    arguments_ = tensors_of(leaves);
    size_t k = 0;
    for (Leaf& leaf : leaves_) {
      if (leaf.is_tensor) leaf.requires_grad = arguments_[k++].requires_grad();
    }
    step_.begin(arguments_);
  }

  void end(const py::list& results, bool last) {
    const std::vector<at::Tensor> arguments = std::exchange(arguments_, {});
    std::vector<at::Tensor> tensors;
    for (const py::handle result : results) {
      tensors.push_back(THPVariable_Unpack(result.ptr()));
      if (has_acc_storage(tensors.back())) continue;
      step_.cancel();
      ACC_FAIL("[torchacc.capture] result ", tensors.size() - 1,
               unfit_text(result, tensors.back()));
    }
    step_.end(arguments, tensors, last);
  }

  void cancel() {
    arguments_.clear();
    step_.cancel();
  }

  Guards& guards() { return guards_; }

  // See Guards::keep_tensor. Returns false for what is no tensor that the step uses.
  bool keep(const py::object& owner, const py::tuple& path, const at::Tensor& tensor,
            const std::string& text, std::optional<bool> requires_grad) {
    if (!uses(tensor)) return false;
    guards_.keep_tensor(owner, path, text, requires_grad, /*or_alike=*/false);
    return true;
  }

  // The same for a variable: not where the step makes what it holds, which may be elsewhere then.
  bool keep_variable(const py::object& owner, const py::tuple& path, const at::Tensor& tensor,
                     const std::string& text, std::optional<bool> requires_grad) {
    if (!has_acc_storage(tensor) || !step_.touches(tensor).reads) return false;
    guards_.keep_tensor(owner, path, text, requires_grad, !tensor.requires_grad());
    return true;
  }

  // See Guards::keep_place.
  void keep_place(const at::Tensor& tensor, const std::string& text,
                  std::optional<bool> requires_grad) {
    if (uses(tensor)) guards_.keep_place(tensor, text, requires_grad);
  }

  // A tensor that the function may know without its arguments.
  void pin_arguments(const at::Tensor& tensor, const std::string& text) {
    if (has_acc_storage(tensor)) step_.pin_arguments(tensor, text);
  }

  // A gradient that the step reads has to stay where it is. One that it makes may be replaced, and
  // is then replaced by the step's.
  void keep_gradient(const at::Tensor& of, const std::string& text) {
    const at::Tensor& grad = of.grad();
    if (!has_acc_storage(grad)) return;
    std::optional<capture::Step::Made> made;
    if (!step_.touches(grad).reads) {
      made = step_.made(grad);
      if (!made.has_value()) return;
    }
    gradients_.push_back({WeakTensor(of.getIntrusivePtr()), capture::weak(record::storage_of(grad)),
                          text, std::move(made)});
    Gradient& kept = gradients_.back();
    if (!kept.made.has_value()) return;
    const auto of_gradient = [&](const WeakTensor& weak) {
      auto impl = weak.lock();
      return impl && is_there(at::Tensor(std::move(impl)), kept);
    };
    const auto first = std::partition(changed_.begin(), changed_.end(), std::not_fn(of_gradient));
    kept.changed.assign(first, changed_.end());
    changed_.erase(first, changed_.end());
  }

  // Counts the step's writes of a tensor, so that autograd notices them.
  void count_writes(const at::Tensor& tensor) {
    if (!has_acc_storage(tensor) || !step_.touches(tensor).changes) return;
    changed_.emplace_back(tensor.getIntrusivePtr());
  }

  std::vector<at::Tensor> replay(const py::tuple& leaves) {
    guards_.check();
    check_gradients();
    const std::vector<at::Tensor> arguments = tensors_of(leaves);
    check_no_gradients(arguments);
    struct Bump {  // whatever happens to the run
      PyStep& step;
      const std::vector<at::Tensor>& arguments;
      std::vector<Anew> anew = {};
      bool on = false;
      ~Bump() {
        if (on) step.bump(arguments, anew);
      }
    } bump{*this, arguments};
    bump.anew = gradients_anew();
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
  bool cut() const { return step_.cut(); }
  bool some_stayed() const { return step_.some_stayed(); }

  // For the garbage collector: what is kept may well hold the step, which `model.step =
  // torchacc.capture(...)` makes a circle.
  int traverse(visitproc visit, void* arg) const {
    for (const Leaf& leaf : leaves_) Py_VISIT(leaf.value.ptr());
    return guards_.traverse(visit, arg);
  }
  void clear() {
    // Taken out first: what dies may call back.
    const auto leaves = std::exchange(leaves_, {});
    guards_.clear();
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

  // Of the arguments.
  struct Leaf {
    bool is_tensor = false;
    bool requires_grad = false;           // of a tensor, when the last recorded call began
    py::object value;                     // of what is no tensor; the type, if it
    std::optional<std::string> contents;  // lends out its memory,
    std::string text;                     // and what it was
  };

  struct Gradient {
    WeakTensor of;
    capture::WeakStorage storage;
    std::string text;
    std::optional<capture::Step::Made> made;  // by the step, rather than read
    std::vector<WeakTensor> changed = {};     // what it makes, as long as that is the gradient
  };

  // A gradient that the step makes is to be this tensor.
  struct Anew {
    Gradient& gradient;
    at::Tensor tensor;
  };

  static bool is_there(const at::Tensor& grad, const Gradient& kept) {
    return has_acc_storage(grad) && record::storage_of(grad) == kept.storage._unsafe_get_target();
  }

  void check_gradients() const {
    for (const Gradient& kept : gradients_) {
      const auto impl = kept.of.lock();
      if (!impl || kept.made.has_value()) continue;
      const at::Tensor& grad = at::Tensor(impl).grad();
      ACC_CHECK(is_there(grad, kept), "[torchacc.capture] ", kept.text,
                grad.defined() ? " is another tensor" : " is None",
                " and the step adds to the one at capture, which is gone from there. Zero it in "
                "place (zero_grad(set_to_none=False)), or zero it within the function.");
    }
  }

  // Where something else is the gradient now, a function that sets it to None before backward
  // leaves a new tensor in its place.
  std::vector<Anew> gradients_anew() {
    std::vector<Anew> anew;
    for (Gradient& kept : gradients_) {
      const auto impl = kept.of.lock();
      if (!impl || !kept.made.has_value()) continue;
      const at::Tensor& grad = at::Tensor(impl).grad();
      if (!grad.defined() || is_there(grad, kept)) continue;
      anew.push_back({kept, step_.leave_anew(*kept.made)});
      kept.storage = capture::weak(record::storage_of(anew.back().tensor));
    }
    return anew;
  }

  // The tensors among the leaves, on acc; the others must be what they were.
  std::vector<at::Tensor> tensors_of(const py::tuple& leaves) const {
    ACC_CHECK(leaves.size() == leaves_.size(), "[torchacc.capture] the step was captured with ",
              leaves_.size(), " arguments and is called with ", leaves.size(),
              ". Capture another one for that.");
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const Leaf& expected = leaves_[i];
      PyObject* leaf = leaves[i].ptr();
      if (expected.is_tensor) {
        ACC_CHECK(THPVariable_Check(leaf), "[torchacc.capture] ", names_[i],
                  " was a tensor at capture and is ", text_of(leaf),
                  ". Capture another step for that.");
        const at::Tensor& tensor = THPVariable_Unpack(leaf);
        ACC_CHECK(has_acc_storage(tensor), "[torchacc.capture] ", names_[i],
                  unfit_text(leaf, tensor));
        tensors.push_back(tensor);
        continue;
      }
      ACC_CHECK(is_equal(expected, leaf), "[torchacc.capture] ", names_[i], " is ", text_of(leaf),
                " and was ",
                expected.contents.has_value() ? expected.text : text_of(expected.value),
                " at capture. What is no tensor is part of the "
                "step: pass a tensor, or capture another step.");
    }
    return tensors;
  }

  // An argument of the recorded calls got none, so none is computed.
  void check_no_gradients(const std::vector<at::Tensor>& arguments) const {
    size_t k = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      if (!leaves_[i].is_tensor) continue;
      ACC_CHECK(!arguments[k].requires_grad() || leaves_[i].requires_grad, "[torchacc.capture] ",
                names_[i],
                " requires gradients and did not at capture, so a replay computes none for it. "
                "Pass detach(), or capture another step for it.");
      ++k;
    }
  }

  static bool is_equal(const Leaf& expected, PyObject* leaf) {
    PyObject* was = expected.value.ptr();
    if (expected.contents.has_value()) {
      return py::type::handle_of(leaf).ptr() == was && holds(leaf, *expected.contents);
    }
    if (leaf == was) return true;
    return !THPVariable_Check(leaf) && Py_TYPE(leaf) == Py_TYPE(was) && are_equal(was, leaf);
  }

  // The run has begun: what it writes counts as written.
  void bump(const std::vector<at::Tensor>& arguments, const std::vector<Anew>& anew) {
    // An inference tensor has no version, and autograd nothing to do with it.
    const auto bump_one = [](c10::TensorImpl& impl) {
      if (!impl.is_inference()) impl.bump_version();
    };
    const auto bump_all = [&](const std::vector<WeakTensor>& tensors) {
      for (const WeakTensor& weak : tensors) {
        if (const auto impl = weak.lock()) bump_one(*impl);
      }
    };
    for (const Anew& each : anew) {
      each.gradient.changed.clear();
      const auto impl = each.gradient.of.lock();
      if (!impl) continue;
      at::Tensor(impl).mutable_grad() = each.tensor;
      each.gradient.changed.emplace_back(each.tensor.getIntrusivePtr());
    }
    bump_all(changed_);
    for (const Gradient& kept : gradients_) bump_all(kept.changed);
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (step_.changes_argument(k)) bump_one(*arguments[k].unsafeGetTensorImpl());
    }
  }

  capture::Step step_;
  std::vector<std::string> names_;  // of the leaves
  std::vector<Leaf> leaves_;
  std::vector<at::Tensor> arguments_;  // of the call being recorded
  Guards guards_;
  std::vector<Gradient> gradients_;
  std::vector<WeakTensor> changed_;
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
  m.def("are_equal", guarded(are_equal), py::arg("a"), py::arg("b"),
        "Whether two objects are equal, arrays number by number; False if Python cannot tell.");
  m.def("hold_the_same", guarded(hold_the_same), py::arg("tensor"), py::arg("was"),
        "Whether a tensor on the CPU has the type, shape and bytes of a contiguous one.");
  m.def("living", guarded(living), py::arg("kinds"),
        "The objects of these types and of those derived from them that the collector knows.");
  py::class_<PyStep>(m, "CapturedStep", py::custom_type_setup(let_collect),
                     "A step of a program that is recorded and replayed.")
      .def(py::init<const py::tuple&, std::vector<std::string>>(), py::arg("leaves"),
           py::arg("names"), "A step with arguments like these, and what errors call them.")
      .def("begin", guarded([](PyStep& self, const py::tuple& leaves) { self.begin(leaves); }),
           py::arg("leaves"), "Begins to record a call with these arguments.")
      .def("end", guarded([](PyStep& self, const py::list& results, bool last) {
             self.end(results, last);
           }),
           py::arg("results"), py::arg("last"),
           "Ends the call; after the last one, throws when it cannot be replayed.")
      .def("cancel", guarded([](PyStep& self) { self.cancel(); }), "Ends a call that raised.")
      .def("take_results", guarded([](PyStep& self) { return self.take_results(); }),
           "The results of the last recorded call.")
      .def("keep",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const at::Tensor& tensor, const std::string& text,
                      std::optional<bool> requires_grad) {
             return self.keep(owner, path, tensor, text, requires_grad);
           }),
           py::arg("owner"), py::arg("path"), py::arg("tensor"), py::arg("text"),
           py::arg("requires_grad") = py::none(),
           "From now on the tensor that is found in the owner by the path has to stay what it is, "
           "and requires_grad as given; False if the step does not use it. An owner is a dict, a "
           "variable's cell or an object, whose attribute the path begins with.")
      .def("keep_variable",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const at::Tensor& tensor, const std::string& text,
                      std::optional<bool> requires_grad) {
             return self.keep_variable(owner, path, tensor, text, requires_grad);
           }),
           py::arg("owner"), py::arg("path"), py::arg("tensor"), py::arg("text"),
           py::arg("requires_grad"),
           "The same for one that the step reads, or another view of the same memory in its place; "
           "False if it does not read it.")
      .def("keep_wrapper",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const std::string& text, std::optional<bool> requires_grad) {
             self.guards().keep_tensor(owner, path, text, requires_grad, /*or_alike=*/false);
           }),
           py::arg("owner"), py::arg("path"), py::arg("text"), py::arg("requires_grad"),
           "The same for a tensor that is made of others, whatever the step uses of these.")
      .def("keep_place",
           guarded([](PyStep& self, const at::Tensor& tensor, const std::string& text,
                      std::optional<bool> requires_grad) {
             self.keep_place(tensor, text, requires_grad);
           }),
           py::arg("tensor"), py::arg("text"), py::arg("requires_grad"),
           "A tensor, if the step uses it, has to stay where it is as long as it lives.")
      .def(
          "keep_gradient", guarded([](PyStep& self, const at::Tensor& of, const std::string& text) {
            self.keep_gradient(of, text);
          }),
          py::arg("of"), py::arg("text"),
          "The same for the gradient of a tensor, if it is read; if it is made, what is put in its "
          "place is replaced by it.")
      .def("keep_value",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const std::string& text,
                      bool exact) { self.guards().keep_value(owner, path, text, exact); }),
           py::arg("owner"), py::arg("path"), py::arg("text"), py::arg("exact") = true,
           "What is found there is a plain value and has to stay equal, and of its type if exact.")
      .def("keep_object",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const std::string& text) { self.guards().keep_object(owner, path, text); }),
           py::arg("owner"), py::arg("path"), py::arg("text"),
           "What is found there has to stay the very object, or None. It is not held.")
      .def("keep_length",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const std::string& text) { self.guards().keep_length(owner, path, text); }),
           py::arg("owner"), py::arg("path"), py::arg("text"),
           "The list, tuple or dict that is found there has to have as many entries.")
      .def("keep_contents",
           guarded([](PyStep& self, const py::object& owner, const py::tuple& path,
                      const std::string& text) { self.guards().keep_contents(owner, path, text); }),
           py::arg("owner"), py::arg("path"), py::arg("text"),
           "A tensor on the CPU or an array that is found there has to hold what it holds; one of "
           "more than `most_bytes` has to stay the very object.")
      .def("keep_answer",
           guarded([](PyStep& self, const py::object& owner, const py::object& name,
                      const std::string& text) { self.guards().keep_answer(owner, name, text); }),
           py::arg("owner"), py::arg("name"), py::arg("text"),
           "What an object answers when it is asked for an attribute has to stay equal.")
      .def("keep_alive",
           guarded([](PyStep& self, const py::object& object, const std::string& text) {
             self.guards().keep_alive(object, text);
           }),
           py::arg("object"), py::arg("text"), "The object has to live. It is not held.")
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
      .def_property_readonly("cut", &PyStep::cut,
                             "Whether the call that is recorded has been submitted in parts.")
      .def_property_readonly("some_stayed", &PyStep::some_stayed,
                             "Whether an argument had one memory in both calls compared.")
      .def_property_readonly_static("most_bytes",
                                    [](const py::object&) { return Guards::kMostBytes; })
      .def_property_readonly("operators", &PyStep::operators);
}

}  // namespace acc::bindings
