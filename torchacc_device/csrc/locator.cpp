#include "torchacc_device/csrc/locator.h"

#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
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
         std::ranges::any_of(library_folders(),
                             [&](const std::string& folder) { return file.starts_with(folder); });
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

uint32_t python_frame() {
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const py::object file = code.attr("co_filename");
    if (const std::string_view name = text(file.ptr()); !is_library(name)) {
      const py::object function = code.attr("co_name");
      return record::intern_source(std::string(name), PyFrame_GetLineNumber(raw),
                                   std::string(text(function.ptr())));
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return 0;
}

}  // namespace

void set_library_folders(std::vector<std::string> folders) {
  library_folders() = std::move(folders);
}

uint32_t locate() {
  if (const auto node = torch::autograd::get_current_node()) {
    return record::intern_source("backward", 0, node->name());
  }
  if (Py_IsInitialized() == 0) return 0;
  py::gil_scoped_acquire acquire;
  return python_frame();
}

}  // namespace acc::bindings
