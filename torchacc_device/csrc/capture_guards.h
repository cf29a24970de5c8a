#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

// What of the Python around a captured step has to stay as it was, for a replay to do what the
// function would do. All of it needs the interpreter lock.
namespace acc::bindings {

// As Python's repr.
std::string text_of(pybind11::handle value);

// As Python's ==, but that arrays are equal where all their numbers are, and that what cannot be
// compared is not equal.
bool are_equal(pybind11::handle a, pybind11::handle b);

class Guards {
 public:
  // The tensor under `key` has to stay the very object that it is, with its storage, and to want a
  // gradient, or not, as is said.
  void keep_tensor(const pybind11::dict& owner, const pybind11::object& key,
                   const std::string& text, std::optional<bool> requires_grad);
  // What is under `key` of a dict, an attribute of an object that is not held, or in a cell: has to
  // stay equal, a dict or list the very object, a list as long.
  void keep_value(const pybind11::object& owner, const pybind11::object& key,
                  const std::string& text);
  // What is under `key` has to stay the very object. It is not held.
  void keep_object(const pybind11::dict& owner, const pybind11::object& key,
                   const std::string& text);
  // The same for an attribute, whose owner is not held either.
  void keep_attribute(const pybind11::object& owner, const pybind11::object& name,
                      const std::string& text);
  // The object has to live.
  void keep_alive(const pybind11::object& object, const std::string& text);
  // A tensor on the CPU has to hold what it holds, as long as there is one.
  void keep_contents(const at::Tensor& tensor, const std::string& text);

  // Throws, and says which, when one of them did not.
  void check() const;

  // For the garbage collector.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  struct Kept {
    // A dict, a weak reference to what has it as its __dict__, or a cell of a variable.
    pybind11::object owner;
    pybind11::object key;
    PyObject* value;  // known by its address; the dict keeps it, or has lost it
    const c10::StorageImpl* storage = nullptr;  // of a tensor
    std::optional<bool> requires_grad = {};
    pybind11::object held = {};  // what is no tensor
    pybind11::object weak = {};  // or a weak reference to it
    Py_ssize_t length = -1;      // of a list
    std::string text;
  };
  struct Living {
    pybind11::object weak;
    std::string text;
  };
  struct Contents {
    c10::weak_intrusive_ptr<c10::TensorImpl> of;
    at::Tensor was;
    std::string text;
  };

  static PyObject* value_now(const Kept& kept);
  static void check_tensor(const Kept& kept, PyObject* value);
  static void check_equal(const Kept& kept, PyObject* value);

  std::vector<Kept> kept_;
  std::vector<Living> living_;
  std::vector<Contents> contents_;
};

}  // namespace acc::bindings
