#pragma once

#include <cstdint>
#include <vector>

#include "lazy/capture/binding.h"
#include "lazy/capture/draws.h"
#include "lazy/graph/graph.h"
#include "lazy/record/recorder.h"

// One replay: makes the trace that the function would have recorded, and what the user gets of it.
namespace acc::capture {

class Filling {
 public:
  // All of them outlive it. `values`: of the recorded call.
  Filling(const graph::Graph& graph, const Bindings& bindings, const Draws& draws,
          const std::vector<int64_t>& values, const std::vector<at::Tensor>& arguments,
          c10::DeviceIndex device)
      : graph_(graph),
        bindings_(bindings),
        draws_(draws),
        values_(values),
        arguments_(arguments),
        device_(device) {}

  // Under the recorder's lock, with nothing pending. Throws when a guard fails, and has then
  // changed nothing.
  void fill(record::Trace& trace);
  // Under the same lock, after the plan was submitted.
  void done();

  std::vector<at::Tensor> take_results() { return std::move(results_); }

 private:
  // A tensor that the recorded call left behind, whose contents are made anew.
  struct Left {
    uint32_t buffer;
    c10::intrusive_ptr<record::LazyStorage> storage;
    c10::intrusive_ptr<record::LazyStorage> result;  // gets a copy of what the run leaves there
    c10::Storage constant;                           // what it holds when the run begins
  };

  void fill_entry(uint32_t i, record::Trace& trace);
  void take_constant(uint32_t i, record::Trace& trace);
  void take_contents(record::LazyStorage& storage, int64_t byte_offset, uint32_t i,
                     record::Trace& trace) const;
  void leave_behind(uint32_t i, record::Trace& trace);
  void check_no_write(const record::LazyStorage& storage, uint32_t i) const;
  void make_results(record::Trace& trace);
  c10::intrusive_ptr<record::LazyStorage> make_storage(uint32_t buffer, record::Trace& trace);

  const graph::Graph& graph_;
  const Bindings& bindings_;
  const Draws& draws_;
  const std::vector<int64_t>& values_;
  const std::vector<at::Tensor>& arguments_;
  c10::DeviceIndex device_;
  std::vector<at::Tensor> results_;
  std::vector<Left> left_;
};

}  // namespace acc::capture
