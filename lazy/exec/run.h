#pragma once

#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/library/aten_call.h"
#include "lazy/exec/kernel_call.h"
#include "lazy/exec/runner.h"
#include "lazy/plan/plan.h"

// The steps of a schedule, ready to be called, and the memory of one run.
namespace acc::exec {

// A result that the operator makes: which buffer takes it.
struct Result {
  uint32_t stack;  // position on the result stack
  int32_t item;    // position in the list there; -1: no list
  const int64_t* word;

  const at::Tensor& of(const torch::jit::Stack& results) const;
};

// The results of an operator that are tensors of its own.
std::vector<Result> results_of(const graph::Graph& graph, const graph::Node& node);

// A step of a plan: one operator of ATen's, or launches of a kernel.
struct PreparedStep {
  std::optional<library::AtenCall> call;
  std::vector<Result> results;
  std::unique_ptr<KernelCall> kernel;
};

// What a plan needs at run time beyond pure data.
struct Prepared {
  explicit Prepared(c10::DeviceIndex device) : table(device) {}

  std::vector<library::Slot> slots;
  // Those that captured operators see. What they are pointed at when the work is captured is theirs
  // for good, while the others follow the inputs of later runs. Empty where nothing is captured.
  std::vector<library::Slot> fixed;
  ArgumentTable table;  // of all kernels
  std::vector<PreparedStep> steps;
  void* arena = nullptr;  // where the slots of arena buffers point into

  void point(uint32_t buffer, void* data, size_t nbytes);
};

// The device of the tensors that share an acc device's memory.
c10::Device alias_device(c10::DeviceIndex index);

// `captured`: per step, whether its operator is going to be captured; empty: none is.
std::unique_ptr<Prepared> prepare(const plan::Plan& plan, const plan::Schedule& schedule,
                                  c10::DeviceIndex device, const std::vector<bool>& captured);

// Whether a step whose operator has failed can be run as if it never had been.
bool may_repeat(const plan::Plan& plan, const plan::Step& step);

// Whether the memory of `tensor` is what the promised geometry describes.
bool as_promised(const at::Tensor& tensor, const graph::TensorWords& promised);

// What a run holds beside its inputs, for the memory statistics of the host. On CUDA the allocator
// counts.
class Held {
 public:
  Held(c10::DeviceIndex device, size_t buffers);
  Held(Held&& other) noexcept : device_(other.device_), bytes_(std::exchange(other.bytes_, {})) {}
  Held& operator=(Held&&) = delete;
  ~Held();

  void take(size_t buffer, size_t bytes);
  void take_arena(size_t bytes) { take(bytes_.size() - 1, bytes); }
  void give(size_t buffer);

 private:
  c10::DeviceIndex device_;
  std::vector<size_t> bytes_;  // per buffer, and the arena
};

class Run {
 public:
  // Takes the inputs out of `given`. Of a run that is captured, the small intermediates get memory
  // that only it and what it captures use; else that of the device.
  Run(const plan::Plan& plan, const plan::Schedule& schedule, Prepared& prepared,
      c10::DeviceIndex index, std::vector<Given>& given, bool is_captured = false);

  // The memory of a step and what its kernel is called with; that on its way to the device, if it
  // is a kernel; and the call, before which `called` is set. One that found no memory can be made
  // again.
  void prepare(size_t index, std::span<const int64_t> values);
  void upload(size_t index);
  void call(size_t index, std::span<const int64_t> values, bool* called);
  // All three.
  void step(size_t index, std::span<const int64_t> values, bool* called);

  // Of the operator that a step calls; null for a kernel.
  const torch::jit::Stack* arguments(size_t index) const;

  // Does not run a step, whose results nobody wants any more. `touched`: by a later step.
  void leave_out(size_t index, const std::vector<bool>& touched);

  std::vector<Output> outputs() const;
  std::vector<Output> take_outputs();
  // Somebody else has what the buffer holds, too, and counts it.
  void share(uint32_t buffer) { held_.give(buffer); }
  void release(uint32_t buffer);

  // What the memory is made of.
  std::vector<std::pair<void*, size_t>> blocks() const;
  // The memory of all buffers, and back to what it was: steps that were not submitted after all.
  std::vector<c10::Storage> memory() const { return memory_; }
  void go_back(std::vector<c10::Storage> memory);
  // That of a captured run; null of another.
  c10::DataPtr take_own_arena() { return std::move(arena_); }

 private:
  void call_operator(const PreparedStep& prepared, std::span<const int64_t> values);
  void place_arena(c10::DeviceIndex index);
  void point_arena(void* arena);
  void own(uint32_t buffer, c10::Storage memory);
  void make(uint32_t buffer);
  void take_over(const plan::Reuse& reuse);
  void adopt(const Result& result, const at::Tensor& tensor);

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  Prepared& prepared_;
  const bool is_captured_;
  std::vector<c10::Storage> memory_;
  c10::DataPtr arena_;  // of its own
  Held held_;
};

// Other processes may write to the memory of a run at any time: nothing else gets it.
void keep_for_ever(Run& run, c10::DeviceIndex device);

}  // namespace acc::exec
