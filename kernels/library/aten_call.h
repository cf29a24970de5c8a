#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lazy/graph/graph.h"

// Any ATen operator as an opaque step: redispatched to the backend's own kernel on alias tensors.
namespace acc::library {

// A buffer of a plan as the kernels see it: a storage of the backend's device whose pointer is set
// anew for each run, so that the tensors over it are made once.
using Slot = c10::intrusive_ptr<c10::StorageImpl>;

// A slot without memory.
Slot make_slot(c10::Device device);
void point(const Slot& slot, void* data, size_t nbytes);

// A tensor over `storage`, below autograd, with the geometry of `word`.
at::Tensor alias(const int64_t* word, c10::Storage storage);

// Throws where a kernel's result is not what was recorded.
void check_promise(const at::Tensor& result, c10::ScalarType dtype, c10::IntArrayRef sizes);

// A node, ready to be called again and again. It refers to the graph's words and to the slots.
class AtenCall {
 public:
  // `into`: the buffer of the single result is in place already; the operator writes into it.
  AtenCall(const graph::Graph& graph, const graph::Node& node, const std::vector<Slot>& slots,
           c10::Device device, bool into);

  // Runs the operator with the step's value block; the results are on the returned stack.
  torch::jit::Stack run(std::span<const int64_t> values) const;

  // As they were prepared: tensors with their geometry, numbers as zeros.
  const torch::jit::Stack& arguments() const { return arguments_; }

 private:
  // An argument that depends on the value block.
  struct Patch {
    uint32_t argument;
    uint32_t value;       // in the step's value block
    const int64_t* word;  // its item
  };
  const c10::OperatorHandle& handle_;
  torch::jit::Stack arguments_;
  std::vector<Patch> patches_;
  // A tensor that the operator writes, and a second one where it has to be afterwards.
  struct Written {
    at::Tensor tensor;
    at::Tensor place;
  };
  static void keep_place(const Written& written);
  void call(torch::jit::Stack& stack) const;
  std::vector<Written> written_;
  const c10::DispatchKeySet keys_;
  bool lazy_bits_ = false;  // an operand is marked as conjugated or negated
};

}  // namespace acc::library
