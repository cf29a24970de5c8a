#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lazy/capture/binding.h"
#include "lazy/capture/draws.h"
#include "lazy/capture/recording.h"
#include "lazy/plan/plan.h"

// Replaying a whole step without running its Python.
//
// A function is called a few times for real, each call recorded as one plan. The last two are
// compared: a buffer that the plan finds is an argument of the call, state that both calls used, a
// result that the call before left, or a constant that the call copied from the host. Numbers must
// be the same, but for those that say where a random operator draws. From then on the plan runs on
// what the arguments and the state hold at that moment.
namespace acc::capture {

class Step {
 public:
  // What errors call the arguments.
  void name_arguments(std::vector<std::string> names) { names_ = std::move(names); }

  // Around a call of the function by this thread. Arguments and results are acc tensors; results
  // are detached, and nothing else holds the graph of the call. `last`: compares it with the call
  // before, and throws when it cannot be replayed. Its work is done all the same.
  void begin(const std::vector<at::Tensor>& arguments);
  void end(const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results,
           bool last);
  // Before `end`: whether the call has been submitted in parts.
  bool cut() const;
  // After a call that raised.
  void cancel() noexcept;
  // Ends recording: the results of the last call as tensors of their own, once nothing of the call
  // but what it left behind holds them.
  std::vector<at::Tensor> take_results();

  // What the plan does to what a tensor holds, other than as an argument.
  struct Touch {
    bool uses = false;     // it reads it, or makes it
    bool reads = false;    // what it holds before the step matters
    bool changes = false;  // in place
  };
  Touch touches(const at::Tensor& tensor) const;
  // A tensor with a storage of its own that the recorded call made and left behind.
  struct Made {
    size_t buffer;
    Geometry geometry;
  };
  std::optional<Made> made(const at::Tensor& tensor) const;
  // A tensor like that one, without contents: from now on the step leaves it behind instead.
  at::Tensor leave_anew(const Made& made);
  bool changes_argument(size_t index) const { return bindings_.arguments.at(index).written; }
  // The function may know this tensor, which `text` names, without its arguments: those that both
  // calls had in its storage have to stay there, as no comparison tells which of the two was meant.
  void pin_arguments(const at::Tensor& tensor, const std::string& text);
  bool some_stayed() const;

  // Runs the plan. Throws when a guard fails, and has then changed nothing and left `*began` false.
  std::vector<at::Tensor> replay(const std::vector<at::Tensor>& arguments, bool* began);

  size_t operators() const { return graph_.nodes.size(); }

 private:
  struct Pin {
    size_t argument;
    std::string text;
  };

  void check_arguments(const std::vector<at::Tensor>& arguments) const;
  void check_settings() const;

  std::vector<std::string> names_;
  c10::DeviceIndex device_ = -1;

  // While calls are recorded.
  size_t calls_ = 0;
  uint64_t settings_ = 0;  // in which the last call began
  std::unique_ptr<Recording> current_;
  std::unique_ptr<Recording> latest_;
  std::vector<c10::Storage> held_;  // per result of the last call, until `take_results`

  // From then on.
  std::shared_ptr<plan::Plan> plan_;
  graph::Graph graph_;  // see Recording
  Bindings bindings_;
  std::vector<Pin> pins_;
  std::unordered_map<const record::LazyStorage*, Touch> touched_;  // `bindings_` knows them weakly
  Draws draws_;
  std::vector<int64_t> values_;
};

}  // namespace acc::capture
