#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lazy/graph/op.h"

// What an operator's results look like, found by running its Meta kernel once per signature.
namespace acc::record {

struct Inference {
  // False: the operator has no Meta kernel or its result depends on data; it has to run at once.
  bool recordable = true;
  // The words of the fresh results, with buffer 0.
  std::vector<int64_t> results;
  size_t largest = 0;  // bytes of the largest of them
  // The geometry that a written argument has to be resized to before the call (out= variants).
  struct Resize {
    uint32_t argument;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  std::vector<Resize> resizes;
};

// Memoised by `signature`: operator, ambient word and words of the call. Runs no Python and takes
// no lock but its own on a hit; on a miss the Meta kernel may need the interpreter lock, so the
// caller holds no lock of acc.
std::shared_ptr<const Inference> infer(std::span<const int64_t> signature, const graph::Op& op,
                                       const c10::OperatorHandle& handle,
                                       c10::ArrayRef<c10::IValue> arguments);

// Where the Meta kernel of an operator and eager on the backend's device differ. Called on a miss
// with the Meta results, which it corrects in place. Returns false for a call that Meta accepts and
// eager refuses: it then runs at once and eager raises.
using MetaRule = bool (*)(c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results);
void install_meta_rule(const std::string& op_name, MetaRule rule);

// Whether this thread is inside a Meta kernel called by `infer`.
bool inferring();

// A Meta kernel to use in place of the dispatcher's, for calls that it `applies` to (given their
// arguments on Meta).
struct MetaKernel {
  c10::KernelFunction kernel;
  bool (*applies)(c10::ArrayRef<c10::IValue> arguments);
};
void install_meta_kernel(const std::string& op_name, MetaKernel kernel);

// The strides of a new result of a pointwise operator on these tensors: those that ATen's iterator
// gives, which Python's Meta kernels miss in some cases.
std::vector<int64_t> pointwise_strides(c10::ArrayRef<c10::IValue> arguments);

// The strides of a copy that keeps the order of dimensions: those of the tensor, where no two of
// its elements share a place and none is left out.
std::vector<int64_t> strides_of_copy(const at::Tensor& tensor);

// Gives an out= argument the geometry of its result, as PyTorch does: with a warning when it holds
// elements already.
void resize_result(const at::Tensor& out, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// Forgets everything that was learnt; for tests of memo misses.
void forget_inferences();

}  // namespace acc::record
