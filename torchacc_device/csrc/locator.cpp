#include "torchacc_device/csrc/locator.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lazy/record/source.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;

// Read and written with the interpreter lock held.
std::vector<std::string>& library_folders() {
  static std::vector<std::string> folders;
  return folders;
}

bool is_library(std::string_view file) {
  return file.starts_with("<frozen") ||
         std::ranges::any_of(library_folders(), [&](const std::string& folder) {
           if (!file.starts_with(folder)) return false;
           // what is installed beside Python's own modules
           const std::string_view rest = file.substr(folder.size());
           return !rest.starts_with("site-packages/") && !rest.starts_with("dist-packages/");
         });
}

std::string_view text(PyObject* object) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) {
    PyErr_Clear();
    return {};
  }
  return {data, static_cast<size_t>(size)};
}

using Object = py::object;

Object object_of(PyObject* owned) { return py::reinterpret_steal<Object>(owned); }

PyFrameObject* raw(const Object& frame) { return reinterpret_cast<PyFrameObject*>(frame.ptr()); }

Object innermost_frame() {
  return object_of(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
}

Object caller_of(const Object& frame) {
  return object_of(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw(frame))));
}

Object code_of(const Object& frame) {
  return object_of(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw(frame))));
}

// The innermost frame of the user's program; no file where there is none. `within_backward`: nor
// where the engine of autograd is called by a frame further in.
record::Source python_place(bool within_backward) {
  for (Object frame = innermost_frame(); frame; frame = caller_of(frame)) {
    const Object code = code_of(frame);
    const Object file = code.attr("co_filename");
    const Object function = code.attr("co_name");
    if (is_library(text(file.ptr()))) {
      if (within_backward && text(function.ptr()) == "_engine_run_backward") return {};
      continue;
    }
    record::Source place;
    place.file = text(file.ptr());
    place.line = PyFrame_GetLineNumber(raw(frame));
    place.function = text(function.ptr());
    return place;
  }
  return {};
}

// ---- modules, for profilers --------------------------------------------------------------------

// The code of torch.nn.Module.__call__'s only frame.
PyObject* module_call() {
  // Never given back: there may be no interpreter any more when static objects die.
  static PyObject* const code = [] {
    const Object module = py::module_::import("torch.nn.modules.module").attr("Module");
    return Object(module.attr("_call_impl").attr("__code__")).release().ptr();
  }();
  return code;
}

// The modules that are being called, the innermost first.
std::vector<Object> modules_called() {
  std::vector<Object> modules;
  for (Object frame = innermost_frame(); frame; frame = caller_of(frame)) {
    if (code_of(frame).ptr() != module_call()) continue;
    const Object locals = frame.attr("f_locals");
    modules.push_back(locals[py::str("self")]);
  }
  return modules;
}

std::string type_name(const Object& module) { return Py_TYPE(module.ptr())->tp_name; }

// Appends ".a.b" where `module` is `parent.a.b`. False: it is no part of `parent`.
bool append_path(const Object& parent, const Object& module, std::string* path, int depth = 0) {
  constexpr int kDeepest = 32;  // nobody nests modules deeper; a module that holds itself ends here
  if (depth > kDeepest || !py::hasattr(parent, "_modules")) return false;
  const Object children = parent.attr("_modules");
  if (!py::isinstance<py::dict>(children)) return false;
  for (const auto& [name, child] : py::reinterpret_borrow<py::dict>(children)) {
    const size_t before = path->size();
    path->append(".").append(text(py::str(name).ptr()));
    if (child.is(module)) return true;
    if (!child.is_none() &&
        append_path(py::reinterpret_borrow<Object>(child), module, path, depth + 1)) {
      return true;
    }
    path->resize(before);
  }
  return false;
}

// "Net.layers.0": the names by which the modules know each other, from the outermost one on.
std::string module_path() {
  std::string path;
  try {
    const std::vector<Object> modules = modules_called();
    for (size_t i = modules.size(); i-- > 0;) {
      if (path.empty()) {
        path = type_name(modules[i]);
      } else if (!append_path(modules[i + 1], modules[i], &path)) {
        path.append(" > ").append(type_name(modules[i]));  // made on the way
      }
    }
  } catch (const py::error_already_set&) {
    // An odd module of the user's: a profile that knows less is no reason to stop the program.
  }
  return path;
}

// ---- which forward operator a node of autograd belongs to --------------------------------------

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Autograd calls its nodes "NllLossBackward0" for aten::nll_loss_forward, say, which is how
// torch/csrc/autograd names what tools/autograd/derivatives.yaml lists.
bool is_backward_of(std::string_view node, std::string_view op) {
  op.remove_prefix(op.rfind(':') + 1);
  op = op.substr(0, op.find('.'));
  constexpr std::string_view kForward = "_forward";
  if (op.ends_with(kForward)) op.remove_suffix(kForward.size());
  size_t at = 0;
  for (const char c : op) {
    if (c == '_') continue;
    if (at == node.size() || lower(node[at++]) != lower(c)) return false;
  }
  return node.substr(at).starts_with("Backward");
}

// The last places, by the number of the node that autograd made for the operator.
class ForwardPlaces {
 public:
  void note(uint64_t thread, uint64_t sequence, const graph::Op* op, uint32_t place) {
    const std::lock_guard lock(mutex_);
    Entry& entry = at(thread, sequence);
    // The operator itself comes first; others follow until there is a next node.
    if (!entry.is_of(thread, sequence)) entry = {thread, sequence, op, place};
  }

  bool is_noted(uint64_t thread, uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    return at(thread, sequence).is_of(thread, sequence);
  }

  // Of a node and its name; 0 where it is not known. An operator that followed a plan is not noted,
  // and one that takes a tensor with a gradient but has none itself (argmax) may be in its stead,
  // so the names have to agree.
  uint32_t find(const torch::autograd::Node& node, std::string_view name) {
    const std::lock_guard lock(mutex_);
    const Entry& entry = at(node.thread_id(), node.sequence_nr());
    if (!entry.is_of(node.thread_id(), node.sequence_nr())) return 0;
    return entry.op == nullptr || is_backward_of(name, entry.op->name) ? entry.place : 0;
  }

 private:
  struct Entry {
    uint64_t thread = 0;  // those of autograd begin at 1
    uint64_t sequence = 0;
    const graph::Op* op = nullptr;  // operators are kept for good; null: a view
    uint32_t place = 0;

    bool is_of(uint64_t of_thread, uint64_t of_sequence) const {
      return thread == of_thread && sequence == of_sequence;
    }
  };
  static constexpr size_t kEntries = size_t{1} << 14;  // more operators than most steps have
  Entry& at(uint64_t thread, uint64_t sequence) {
    return entries_[(sequence + thread * 0x9e3779b97f4a7c15ULL) % kEntries];
  }
  // Who waits for it may hold the interpreter lock, so who holds it must not take that.
  std::mutex mutex_;
  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

ForwardPlaces& forward_places() {
  static ForwardPlaces& places = *new ForwardPlaces;
  return places;
}

// The number of the node that autograd has made right before it called the operator or view.
uint64_t last_sequence() { return at::sequence_number::peek() - 1; }

// `op`: null for a view.
void note_forward(const graph::Op* op, uint32_t place) {
  forward_places().note(at::RecordFunction::currentThreadId(), last_sequence(), op, place);
}

record::Source place_in_python(bool within_backward, bool modules) {
  if (Py_IsInitialized() == 0) return {};
  const py::gil_scoped_acquire acquire;
  record::Source place = python_place(within_backward);
  if (modules && !(within_backward && place.file.empty())) place.module = module_path();
  return place;
}

// Where an operator or a view is called. In the backward pass that is the forward operator's place,
// unless Python calls it: a Function's backward, or a forward that is computed again.
record::Source place_of_call(bool modules) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return place_in_python(false, modules);
  std::string name = node->name();
  const uint32_t forward = forward_places().find(*node, name);
  record::Source place;
  // The engine has let the interpreter go, and whoever has it now may keep it for 5 ms: it is asked
  // only where the place is not known, or gradients are kept, as while a forward is computed again.
  if (forward == 0 || at::GradMode::is_enabled()) place = place_in_python(true, modules);
  if (place.file.empty()) place = record::source_of(forward);
  place.node = std::move(name);
  return place;
}

uint32_t here() {
  record::Source place = place_of_call(false);
  if (place.file.empty()) {
    std::string node = std::move(place.node);
    place = place_in_python(false, false);
    place.node = std::move(node);
  }
  return record::intern_source(std::move(place));
}

uint32_t of_operator(const graph::Op& op, bool differentiable) {
  const uint32_t number = record::intern_source(place_of_call(false));
  if (differentiable) note_forward(&op, number);
  return number;
}

bool profiled() {
  const auto* profiler = torch::profiler::impl::ProfilerStateBase::get();
  return profiler != nullptr && (profiler->config().with_stack || profiler->config().with_modules);
}

uint32_t of_profiled(const graph::Op& op, bool differentiable) {
  const uint32_t number = record::intern_source(place_of_call(true));
  if (differentiable) note_forward(&op, number);
  return number;
}

void note_view() {
  // One node may stand for many views.
  if (forward_places().is_noted(at::RecordFunction::currentThreadId(), last_sequence())) return;
  note_forward(nullptr, record::intern_source(place_of_call(profiled())));
}

}  // namespace

void set_library_folders(std::vector<std::string> folders) {
  library_folders() = std::move(folders);
}

record::Locator locator() { return {&here, &of_operator, &profiled, &of_profiled, &note_view}; }

}  // namespace acc::bindings
