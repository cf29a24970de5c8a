#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lazy/capture/step.h"

// What of the Python around a captured step has to stay as it was, for a replay to do what the
// function would do. All of it needs the interpreter lock.
namespace acc::bindings {

// As Python's repr.
std::string text_of(pybind11::handle value);

// As Python's ==, but that arrays are equal where all their numbers are, and that what cannot be
// compared is not equal.
bool are_equal(pybind11::handle a, pybind11::handle b);

// What an object holds that lends out its memory, as a numpy array does: it may be written there.
std::optional<std::string> contents_of(PyObject* object);
// Whether those are the contents of an object.
bool holds(PyObject* object, const std::string& contents);

// Whether a tensor on the CPU has this type, this shape and these bytes.
bool hold_the_same(const at::Tensor& tensor, const at::Tensor& was);

// Whether all memory of a tensor is a storage of acc's: not so of a wrapper around other tensors (a
// DTensor, a nested tensor), whose device is acc as well.
bool has_acc_storage(const at::Tensor& tensor);

// Something is found in an owner by a path. The owner is a dict or a variable's cell, which are
// held, or another object, which is not: then the path begins with an attribute. It goes on with
// keys of dicts, indices of lists and tuples and names of what other objects have as attributes of
// their own, whatever these are when it is looked for. Nothing that is found is held but plain
// values, and where the owner is gone, nothing is looked at.
class Guards {
 public:
  // A tensor has to stay the very object that it is, with its storage and geometry (but one that is
  // made of others, which has none), and to want a gradient, or not, as is said. `or_alike`: or
  // another one there.
  void keep_tensor(const pybind11::object& owner, const pybind11::tuple& path,
                   const std::string& text, std::optional<bool> requires_grad, bool or_alike);
  // A plain value has to stay equal and, if `exact`, of its type (so in tuples of such).
  void keep_value(const pybind11::object& owner, const pybind11::tuple& path,
                  const std::string& text, bool exact);
  // An object has to stay the very one; so does None.
  void keep_object(const pybind11::object& owner, const pybind11::tuple& path,
                   const std::string& text);
  // A list, tuple or dict has to have as many entries.
  void keep_length(const pybind11::object& owner, const pybind11::tuple& path,
                   const std::string& text);
  // A tensor on the CPU or an array of numpy has to hold what it holds, be it another one. Of those
  // above `kMostBytes` it has to stay the very one, a tensor without another write.
  void keep_contents(const pybind11::object& owner, const pybind11::tuple& path,
                     const std::string& text);
  // What an object answers when it is asked for an attribute, which it need not have as its own.
  void keep_answer(const pybind11::object& owner, const pybind11::object& name,
                   const std::string& text);
  // A tensor has to have its storage and geometry and to want a gradient, or not, as is said, as
  // long as it lives.
  void keep_place(const at::Tensor& tensor, const std::string& text,
                  std::optional<bool> requires_grad);
  // The object has to live.
  void keep_alive(const pybind11::object& object, const std::string& text);

  // Throws, and says which, when one of them did not.
  void check();

  // For the garbage collector.
  int traverse(visitproc visit, void* arg) const;
  void clear();

  static constexpr size_t kMostBytes = size_t{1} << 20;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

  // In a dict or among attributes, or in a list or tuple.
  struct Key {
    pybind11::object object = {};
    Py_ssize_t index = -1;
    // An optimizer's state is known by its parameters, and these by their addresses: whatever is
    // there later has to be in the storage that the step knows. torch swaps no tensors (`Module.to`
    // may, `swap_tensors`) that something refers to weakly, as the step does to those that it
    // writes, to count that, and to those that it leaves gradients on.
    const PyObject* tensor = nullptr;
    mutable Py_ssize_t position = 0;  // in the dict, as PyDict_Next counts
  };
  // What the last steps of paths start from.
  struct Within {
    pybind11::object owner = {};  // a dict, a cell or a weak reference; none: it is in another one
    size_t in = 0;
    Key key = {};
  };
  // Where a tensor lies.
  struct Place {
    // The step knows it weakly, so no other one is there. None of a tensor that is made of others.
    const c10::StorageImpl* storage;
    capture::Geometry geometry;
    std::optional<bool> requires_grad;
  };
  struct Kept {
    size_t in = 0;
    Key key;
    std::string text;
  };
  struct KeptTensor : Kept {
    const PyObject* tensor;
    Place place;
    bool or_alike;
  };
  struct KeptValue : Kept {
    pybind11::object value;
    bool exact;
  };
  struct KeptObject : Kept {
    pybind11::object weak;  // or None, or nothing:
    const PyObject* tensor = nullptr;
  };
  struct KeptLength : Kept {
    Py_ssize_t length;
  };
  struct KeptContents : Kept {
    // Of a tensor: the one that was looked at last, its writes then and where it was, and what it
    // held at capture, if it is not large.
    WeakTensor tensor{c10::intrusive_ptr<c10::TensorImpl>()};
    uint32_t version = 0;
    const void* data = nullptr;
    at::Tensor was;
    // Of an array: its type, and what it held; of a large one, a weak reference.
    pybind11::object is;
    std::optional<std::string> contents;
    std::string was_text;
  };
  struct Answer {
    pybind11::object weak;
    pybind11::object name;
    pybind11::object value;
    std::string text;
  };
  struct KeptPlace {
    WeakTensor tensor;
    Place place;
    std::string text;
  };
  struct Living {
    pybind11::object weak;
    std::string text;
  };

  static Key key_of(const pybind11::object& within, const pybind11::handle& key);
  static pybind11::object member(const pybind11::object& within, const Key& key);
  static std::optional<pybind11::object> now(const Within& owner);
  static Place place_of(const at::Tensor& tensor, std::optional<bool> requires_grad);
  static void check_geometry(const at::Tensor& tensor, const Place& place, const std::string& text);
  static void check_place(const at::Tensor& tensor, const Place& place, const std::string& text);
  static void check_tensor(const KeptTensor& kept, const pybind11::object& value);
  static void check_object(const KeptObject& kept, const pybind11::object& value);
  static void check_length(const KeptLength& kept, const pybind11::object& value);
  static void check_value(const KeptValue& kept, const pybind11::object& value);
  static void check_contents(KeptContents& kept, const pybind11::object& value);
  size_t add(Within within, const void* key, size_t in);
  // Follows a path; nothing where it leads nowhere.
  std::optional<std::pair<Kept, pybind11::object>> find(const pybind11::object& owner,
                                                        const pybind11::tuple& path,
                                                        const std::string& text);

  std::vector<Within> within_;                              // each behind the one that it is in
  std::map<std::pair<size_t, const void*>, size_t> known_;  // of these, by what leads there
  std::vector<KeptTensor> tensors_;
  std::vector<KeptValue> values_;
  std::vector<KeptObject> objects_;
  std::vector<KeptLength> lengths_;
  std::vector<KeptContents> contents_;
  std::vector<Answer> answers_;
  std::vector<KeptPlace> places_;
  std::vector<Living> living_;
};

}  // namespace acc::bindings
