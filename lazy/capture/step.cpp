#include "lazy/capture/step.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "lazy/capture/filling.h"
#include "lazy/record/recorder.h"
#include "lazy/session/replay.h"
#include "lazy/session/session.h"

namespace acc::capture {

using record::LazyStorage;
using Kind = Binding::Kind;

// The settings that a function finds, but for grad mode: what a step returns has no graph.
static uint64_t settings_here() {
  const c10::AutoGradMode any(false);
  return runtime::ambient_word(/*products=*/true);
}

void Step::begin(const std::vector<at::Tensor>& arguments) {
  // Arguments without contents get some: the next ones will have them.
  for (const at::Tensor& tensor : arguments) {
    session::alias(tensor, record::FlushReason::kExplicit);
  }
  session::flush(-1, record::FlushReason::kExplicit);
  settings_ = settings_here();
  record::start_watching();
  current_ = std::make_unique<Recording>();
  runtime::log_draws();
}

void Step::cancel() noexcept {
  if (current_ == nullptr) return;
  current_.reset();
  record::stop_watching();
  runtime::logged_draws();
}

bool Step::cut() const { return current_ != nullptr && !record::cuts().empty(); }

void Step::end(const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results,
               bool last) {
  record::stop_watching();
  std::unique_ptr<Recording> recording = std::move(current_);
  recording->call = ++calls_;
  recording->cuts = record::cuts();
  note_draws(runtime::logged_draws(), *recording);
  const auto given = [](const at::Tensor& tensor) {
    return Given{weak(record::storage_of(tensor)), geometry_of(tensor), first_byte(tensor)};
  };
  std::ranges::transform(arguments, std::back_inserter(recording->arguments), given);
  std::ranges::transform(results, std::back_inserter(recording->results), given);

  std::shared_ptr<plan::Plan> own;
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    const auto look = [&](const record::Trace& trace, const std::shared_ptr<plan::Plan>& plan,
                          const std::vector<bool>& alive) -> std::shared_ptr<plan::Plan> {
      recording->note(trace, plan, alive, device);
      own = plan;
      // The passes may have added buffers, which nobody outside knows.
      const bool fits = std::equal(alive.begin(), alive.end(), plan->outputs.begin());
      if (!last || fits) return nullptr;
      // Other steps with this graph needed more of what it makes.
      own = session::make_plan(recording->graph, plan->key, alive, plan->options);
      return own;
    };
    if (!session::submit_watched(device, look)) continue;
    ++recording->devices;
    device_ = device;
  }
  const std::unique_ptr<Recording> before = std::exchange(latest_, std::move(recording));
  if (!last) return;

  ACC_CHECK(before != nullptr);
  check_whole(*latest_);
  check_whole(*before);
  compare(*before, *latest_);
  draws_.learn(*before, *latest_);
  bindings_ = bindings_of(*before, *latest_, arguments, results);
  for (size_t r = 0; r < results.size(); ++r) {
    held_.push_back(bindings_.results[r].kind == Kind::kMade
                        ? record::storage_of(results[r])->memory()
                        : c10::Storage());
  }
  for (size_t i = 0; i < bindings_.buffers.size(); ++i) {
    const Binding& binding = bindings_.buffers[i];
    const LazyStorage* storage = binding.storage._unsafe_get_target();
    if (storage == nullptr) continue;
    Touch& touch = touched_[storage];
    touch.uses = true;
    touch.reads = touch.reads || binding.kind == Kind::kState;
    // What is left behind is made anew at each call.
    touch.changes = touch.changes || latest_->graph.buffers[i].written ||
                    binding.kind == Kind::kMade || binding.kind == Kind::kConstant;
  }
  values_ = std::move(latest_->values);
  graph_ = std::move(latest_->graph);
  plan_ = std::move(own);
  latest_.reset();
}

std::vector<at::Tensor> Step::take_results() {
  std::vector<at::Tensor> results;
  for (size_t r = 0; r < bindings_.results.size(); ++r) {
    const Result& result = bindings_.results[r];
    c10::intrusive_ptr<LazyStorage> storage;
    if (result.kind != Kind::kMade) {
      storage = result.storage.lock();
    } else {
      for (size_t other = 0; other < r && !storage; ++other) {
        const Result& earlier = bindings_.results[other];
        if (earlier.kind != Kind::kMade || earlier.index != result.index) continue;
        storage = c10::intrusive_ptr<LazyStorage>::reclaim_copy(record::storage_of(results[other]));
      }
      if (!storage) {
        storage = record::make_storage(graph_.buffers[result.index].nbytes, device_);
        const bool left = !bindings_.buffers[result.index].storage.expired();
        if (held_[r]) {
          const auto lock = record::recorder(device_).lock();
          storage->set_memory(left ? copy_of(held_[r], device_) : held_[r]);
        }
      }
    }
    results.push_back(storage
                          ? tensor_over(std::move(storage), result.geometry, result.geometry.offset)
                          : at::Tensor());
  }
  held_.clear();
  return results;
}

Step::Touch Step::touches(const at::Tensor& tensor) const {
  const auto found = touched_.find(record::storage_of(tensor));
  return found == touched_.end() ? Touch() : found->second;
}

std::optional<Step::Made> Step::made(const at::Tensor& tensor) const {
  if (!tensor.is_non_overlapping_and_dense()) return std::nullopt;
  const auto left = std::ranges::find_if(bindings_.buffers, [&](const Binding& binding) {
    return binding.kind == Kind::kMade && binding.nbytes == tensor.nbytes() &&
           binding.storage._unsafe_get_target() == record::storage_of(tensor);
  });
  if (left == bindings_.buffers.end()) return std::nullopt;
  return Made{static_cast<size_t>(left - bindings_.buffers.begin()), geometry_of(tensor)};
}

at::Tensor Step::leave_anew(const Made& made) {
  Binding& binding = bindings_.buffers[made.buffer];
  const auto storage = record::make_storage(binding.nbytes, device_);
  binding.storage = WeakStorage(storage);
  return tensor_over(storage, made.geometry, made.geometry.offset);
}

void Step::pin_arguments(const at::Tensor& tensor, const std::string& text) {
  const LazyStorage* storage = record::storage_of(tensor);
  for (size_t k = 0; k < bindings_.arguments.size(); ++k) {
    if (bindings_.arguments[k].stayed._unsafe_get_target() != storage) continue;
    const bool known =
        std::ranges::any_of(pins_, [&](const Pin& pin) { return pin.argument == k; });
    if (!known) pins_.push_back({k, text});
  }
}

bool Step::some_stayed() const {
  return std::ranges::any_of(bindings_.arguments, [](const Argument& argument) {
    return argument.stayed._unsafe_get_target() != nullptr;
  });
}

namespace {

void check_argument(const at::Tensor& tensor, const Argument& expected, const std::string& name,
                    c10::DeviceIndex device) {
  const auto wrong = [&](const char* what, const auto& is, const auto& was) {
    ACC_FAIL("[torchacc.capture] ", name, " has ", what, " ", is, ", at capture it had ", was,
             ". Capture another step for it.");
  };
  if (tensor.device().index() != device) {
    wrong("device", tensor.device(), runtime::acc_device(device));
  }
  const Geometry& geometry = expected.geometry;
  if (tensor.scalar_type() != geometry.dtype) {
    wrong("dtype", c10::toString(tensor.scalar_type()), c10::toString(geometry.dtype));
  }
  if (tensor.sizes() != c10::IntArrayRef(geometry.sizes)) {
    wrong("shape", tensor.sizes(), c10::IntArrayRef(geometry.sizes));
  }
  if (tensor.strides() != c10::IntArrayRef(geometry.strides)) {
    wrong("strides", tensor.strides(), c10::IntArrayRef(geometry.strides));
  }
  if (tensor.is_conj() != geometry.conj || tensor.is_neg() != geometry.neg) {
    wrong("a pending conjugation or negation:", tensor.is_conj() || tensor.is_neg(),
          geometry.conj || geometry.neg);
  }
}

}  // namespace

void Step::check_arguments(const std::vector<at::Tensor>& arguments) const {
  for (size_t k = 0; k < arguments.size(); ++k) {
    const Argument& expected = bindings_.arguments[k];
    check_argument(arguments[k], expected, names_[k], device_);
    if (expected.same == k) continue;
    const at::Tensor& other = arguments[expected.same];
    ACC_CHECK(arguments[k].is_alias_of(other) &&
                  first_byte(arguments[k]) - first_byte(other) == expected.distance,
              "[torchacc.capture] ", names_[expected.same], " and ", names_[k],
              " shared memory at capture, ", expected.distance,
              " bytes apart, and do not now. Capture another step for them.");
  }
  for (const Pin& pin : pins_) {
    const Argument& expected = bindings_.arguments[pin.argument];
    const at::Tensor& tensor = arguments[pin.argument];
    const bool there = expected.moved || tensor.storage_offset() == expected.geometry.offset;
    ACC_CHECK(record::storage_of(tensor) == expected.stayed._unsafe_get_target() && there,
              "[torchacc.capture] ", names_[pin.argument], " had the memory of ", pin.text,
              " in the calls that were compared", expected.moved ? "" : ", at the same place",
              ", so nothing tells which of the two the function used. Capture the step with other "
              "tensors as arguments, or with a clone().");
  }
}

void Step::check_settings() const {
  const uint64_t now = settings_here();
  if (now == settings_) return;
  const runtime::ChangedSetting changed = runtime::changed_settings(settings_, now).front();
  ACC_FAIL("[torchacc.capture] a setting of PyTorch is not what it was at capture: ", changed.name,
           ": ", changed.before, " -> ", changed.after,
           ". Set it back, or capture another step with it.");
}

std::vector<at::Tensor> Step::replay(const std::vector<at::Tensor>& arguments, bool* began) {
  ACC_CHECK(plan_ != nullptr && arguments.size() == bindings_.arguments.size());
  ACC_CHECK(!record::watching_here(),
            "[torchacc.capture] a captured step was called within another one. Call the function "
            "that it was made of.");
  check_settings();
  check_arguments(arguments);
  draws_.check();
  if (plan_->to_be_plain) plan_ = session::renewed(device_, plan_);
  Filling filling(graph_, bindings_, draws_, values_, arguments, device_);
  session::replay(device_, plan_,
                  {[&](record::Trace& trace) {
                     filling.fill(trace);
                     *began = true;
                   },
                   [&] { filling.done(); }});
  return filling.take_results();
}

}  // namespace acc::capture
