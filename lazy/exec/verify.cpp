#include "lazy/exec/verify.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/fmin.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/gil.h"
#include "lazy/exec/interpreter.h"
#include "lazy/exec/kernels.h"
#include "lazy/exec/run.h"
#include "lazy/exec/surroundings.h"
#include "lazy/graph/words.h"

namespace acc::exec {
namespace {

// How many times ATen's own error, and the rounding of its type, a value may be away. Sums of
// another order and contractions stay far below; a wrong operand or constant is far above.
constexpr double kTimes = 16;
// Times the rounding, where nothing tells ATen's own error: of float64, and behind random
// operators.
constexpr double kTimesAlone = 1024;

double rounding(c10::ScalarType type) {
  switch (type) {
    case c10::kHalf:
      return 0x1p-11;
    case c10::kBFloat16:
      return 0x1p-8;
    case c10::kFloat:
    case c10::kComplexFloat:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

// A copy on the CPU of what the memory has, read as elements of `type`.
at::Tensor copied(const c10::Storage& memory, c10::ScalarType type) {
  const auto elements = static_cast<int64_t>(memory.nbytes() / c10::elementSize(type));
  const int64_t tag = graph::make_tag(graph::Tag::kTensor, static_cast<uint8_t>(type), 0, 1);
  const std::array<int64_t, 5> word{tag, 0, 0, elements, 1};
  const at::Tensor all = library::alias(word.data(), memory);
  return memory.device().is_cpu() ? all.clone() : all.cpu();
}

// Calls `each` with the word of every tensor that the node writes, results included, and its name.
template <class Each>
void for_each_written(const graph::Graph& graph, const graph::Node& node, const Each& each) {
  const int64_t* word = graph.words.data() + node.words;
  for (const graph::Argument& argument : node.op->arguments) {
    const int64_t* const end = word + graph::item_words(word);
    if (argument.writes) {
      graph::for_each_tensor(word, end, [&](const int64_t* tensor) {
        each(tensor, base::concat("the argument ", argument.name));
      });
    }
    word = end;
  }
  size_t number = 0;
  graph::for_each_tensor(word, graph.words.data() + node.end, [&](const int64_t* tensor) {
    each(tensor, base::concat("result ", number++));
  });
}

// The recorded step by ATen, and every value that it has made.
class Reference {
 public:
  struct Value {
    size_t node;
    std::string name;
    const int64_t* word;
    at::Tensor contents;
  };

  Reference(const graph::Graph& graph, std::span<const Given> given) : interpreter_(graph) {
    // Views of one storage share their memory here, too.
    std::map<const void*, at::Tensor> copies;
    for (uint32_t i = 0; i < given.size(); ++i) {
      if (!given[i].memory) continue;
      const c10::Storage& memory = given[i].memory;
      auto [found, added] = copies.try_emplace(memory.data());
      if (added) found->second = copied(memory, c10::kByte);
      interpreter_.give(i, found->second, given[i].byte_offset);
    }
    values_.resize(graph.buffers.size());
  }

  void run(const graph::Graph& graph, std::span<const int64_t> values,
           runtime::AmbientScope& ambient) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      const graph::Node& node = graph.nodes[i];
      ambient.set(node.ambient);
      interpreter_.run(node, values);
      for_each_written(graph, node, [&](const int64_t* word, std::string name) {
        const at::Tensor made = interpreter_.tensor(word);
        if (made.numel() == 0) return;
        values_[static_cast<size_t>(word[1])].push_back({i, std::move(name), word, made.clone()});
      });
    }
  }

  // What a tensor of the plan, which the passes may lay out anew, has to be; null where they left
  // nothing that could be compared.
  const Value* find(const graph::Node& node, const int64_t* word) const {
    const auto buffer = static_cast<size_t>(word[1]);
    if (buffer >= values_.size()) return nullptr;
    const Value* found = nullptr;
    for (const Value& each : values_[buffer]) {
      if (!alike(each.word, word)) continue;
      if (each.node == node.origin) return &each;
      if (found != nullptr) return nullptr;  // which of them is not known
      found = &each;
    }
    return found != nullptr && values_[buffer].size() == 1 ? found : nullptr;
  }

 private:
  static bool alike(const int64_t* a, const int64_t* b) {
    const graph::TensorWords x = graph::read_tensor(a);
    const graph::TensorWords y = graph::read_tensor(b);
    return x.dtype == y.dtype && x.flags == y.flags && x.offset == y.offset &&
           std::ranges::equal(x.sizes, y.sizes);
  }

  Interpreter interpreter_;
  std::vector<std::vector<Value>> values_;  // per buffer
};

// How far `actual` is from `expected`, and how far it may be. `exact`: the same in float64.
// `coarsest`: the largest rounding of what the step computes with, which a kernel may leave out.
void judge(const at::Tensor& actual, const at::Tensor& expected,
           const std::optional<at::Tensor>& exact, double coarsest, Mismatch* found) {
  found->elements = expected.numel();
  const c10::ScalarType type = expected.scalar_type();
  if (!c10::isFloatingType(type) && !c10::isComplexType(type)) {
    at::Tensor differs = actual.ne(expected);
    // A comparison of numbers that differ by a rounding.
    if (exact.has_value()) differs = differs.logical_and(actual.ne(*exact));
    found->wrong = differs.sum().item().toLong();
    if (found->wrong == 0) return;
    const auto first = differs.flatten().to(c10::kByte).argmax().item().toLong();
    found->actual = actual.flatten()[first].to(c10::kDouble).item().toDouble();
    found->expected = expected.flatten()[first].to(c10::kDouble).item().toDouble();
    found->error = std::abs(found->actual - found->expected);
    return;
  }
  const auto real = [](const at::Tensor& tensor) {
    const at::Tensor plain = tensor.resolve_conj().resolve_neg();
    return (plain.is_complex() ? at::view_as_real(plain) : plain).to(c10::kDouble).flatten();
  };
  const at::Tensor a = real(actual);
  const at::Tensor e = real(expected);
  const auto largest = [](const at::Tensor& tensor) {
    return tensor.nan_to_num(0, 0, 0).abs().max().item().toDouble();
  };
  const double scale = largest(e);
  double tolerance = 0;
  at::Tensor distance = a.sub(e).abs();
  if (exact.has_value() && is_small_float(static_cast<uint8_t>(type))) {
    const at::Tensor x = real(*exact);
    tolerance = kTimes * (rounding(type) * scale + largest(e.sub(x).nan_to_num(0, 0, 0)));
    distance = at::fmin(distance, a.sub(x).abs());  // what is nearer to the truth is not wrong
  } else {
    tolerance = std::max(kTimesAlone * rounding(type), kTimes * coarsest) * scale;
  }
  found->tolerance = std::max<double>(tolerance, std::numeric_limits<float>::min());
  const at::Tensor same = a.eq(e).logical_or(a.isnan().logical_and(e.isnan()));
  distance = distance.masked_fill(same, 0).nan_to_num(INFINITY, INFINITY, INFINITY);
  found->wrong = distance.gt(found->tolerance).sum().item().toLong();
  if (found->wrong == 0) return;
  const auto worst = distance.argmax().item().toLong();
  found->actual = a[worst].item().toDouble();
  found->expected = e[worst].item().toDouble();
  found->error = std::abs(found->actual - found->expected);
}

// Whether two tensors of one buffer have bytes in common, or have some between those of the other.
bool overlap(const int64_t* a, const int64_t* b) {
  const auto range = [](const int64_t* word) {
    const graph::TensorWords t = graph::read_tensor(word);
    int64_t last = t.offset;
    for (size_t i = 0; i < t.sizes.size(); ++i) {
      last += std::max<int64_t>(t.sizes[i] - 1, 0) * t.strides[i];
    }
    const auto bytes = static_cast<int64_t>(graph::element_bytes(t.dtype));
    return std::pair(t.offset * bytes, (last + 1) * bytes);
  };
  const auto [begin, end] = range(a);
  const auto [other_begin, other_end] = range(b);
  return begin < other_end && other_begin < end;
}

class Verification {
 public:
  Verification(plan::Plan& plan, plan::Schedule& schedule, c10::DeviceIndex device,
               std::span<const int64_t> values, const Reference& reference, Verified* verified)
      : plan_(plan),
        schedule_(schedule),
        values_(values),
        reference_(reference),
        verified_(*verified),
        prepared_(prepare(plan, schedule, device, {})),
        wide_(in_float64(plan.program)) {}

  void run(std::vector<Given>& given, c10::DeviceIndex device, runtime::AmbientScope& ambient,
           Outcome* outcome) {
    const std::vector<Given> kept = given;  // a run gives inputs up, which are compared
    Run run(plan_, schedule_, *prepared_, device, given);
    size_t& step = outcome->failed_step;
    try {
      for (step = 0; step < schedule_.steps.size(); ++step) {
        ambient.set(plan_.program.nodes[schedule_.steps[step].nodes[0]].ambient);
        const auto exact = in_float64_too(step);
        bool called = false;
        run.step(step, values_, &called);
        try {
          compare(step, exact.get());
        } catch (const std::exception& error) {  // which is not the step's
          if (runtime::is_interrupt(error)) throw;
          verified_.problems.emplace_back(error.what());
        }
      }
      plan_.has_run = true;
    } catch (...) {
      outcome->error = std::current_exception();
    }
    outcome->outputs = run.take_outputs();
    base::count(base::Counter::Steps, step);
  }

 private:
  // The step's operators in float64, from what is in memory now. Null: they cannot be, or draw
  // random numbers, which would be others.
  std::unique_ptr<Interpreter> in_float64_too(size_t step) {
    auto exact = std::make_unique<Interpreter>(wide_);
    try {
      for (const uint32_t index : schedule_.steps[step].nodes) {
        const graph::Node& node = plan_.program.nodes[index];
        if (!node.op->mergeable) return nullptr;
        graph::for_each_tensor(plan_.program.words.data() + node.words,
                               plan_.program.words.data() + node.outputs,
                               [&](const int64_t* word) { give(word, exact.get()); });
        exact->run(wide_.nodes[index], values_);
      }
    } catch (const std::exception& error) {
      if (runtime::is_interrupt(error)) throw;
      return nullptr;
    }
    return exact;
  }

  // What a buffer has now, from its first byte on, read as the type of `word`.
  void give(const int64_t* word, Interpreter* exact) {
    const auto buffer = static_cast<uint32_t>(word[1]);
    if (exact->has(buffer)) return;
    const library::Slot& slot = prepared_->slots[buffer];
    if (slot->data() == nullptr) return;
    const auto dtype = static_cast<c10::ScalarType>(graph::dtype_of(*word));
    at::Tensor contents = copied(slot, dtype);
    if (is_small_float(graph::dtype_of(*word))) contents = contents.to(c10::kDouble);
    exact->give(buffer, contents, 0);
  }

  void compare(size_t index, Interpreter* exact) {
    const plan::Step& step = schedule_.steps[index];
    struct Written {
      const graph::Node* node;
      const int64_t* word;
    };
    std::vector<Written> written;
    const std::vector<bool> stored = stored_by(step);
    for (const uint32_t each : step.nodes) {
      const graph::Node& node = plan_.program.nodes[each];
      for_each_written(plan_.program, node, [&](const int64_t* word, const std::string&) {
        const auto buffer = static_cast<uint32_t>(word[1]);
        // What the step itself writes over is not there any more.
        std::erase_if(written, [&](const Written& other) {
          return other.word[1] == word[1] && overlap(other.word, word);
        });
        if (stored[buffer]) written.push_back({&node, word});
      });
    }
    double coarsest = 0;
    for (const uint32_t each : step.nodes) {
      const graph::Node& node = plan_.program.nodes[each];
      graph::for_each_tensor(plan_.program.words.data() + node.words,
                             plan_.program.words.data() + node.end, [&](const int64_t* word) {
                               const auto type =
                                   static_cast<c10::ScalarType>(graph::dtype_of(*word));
                               if (!c10::isFloatingType(type)) return;
                               coarsest = std::max(coarsest, rounding(type));
                             });
    }
    ++verified_.steps;
    if (step.kernel != plan::kNoKernel) ++verified_.kernels;
    for (const Written& each : written) {
      const Reference::Value* value = reference_.find(*each.node, each.word);
      if (value == nullptr) continue;
      const library::Slot& slot = prepared_->slots[static_cast<size_t>(each.word[1])];
      const at::Tensor place = library::alias(each.word, slot);
      std::optional<at::Tensor> truth;
      if (exact != nullptr) {
        const auto at = each.word - plan_.program.words.data();
        truth = exact->tensor(wide_.words.data() + at);
      }
      Mismatch found;
      ++verified_.values;
      judge(place.cpu(), value->contents, truth, coarsest, &found);
      if (found.wrong > 0) add(std::move(found), step, *value);
      place.copy_(value->contents);
    }
  }

  // Per buffer, whether the step leaves something in it that is there when the step is over.
  std::vector<bool> stored_by(const plan::Step& step) const {
    std::vector<bool> stored(plan_.program.buffers.size(), false);
    for (const graph::Use& use : plan::uses(plan_, step)) {
      if (use.writes) stored[use.buffer] = true;
    }
    for (const uint32_t buffer : step.release) {
      if (schedule_.places[buffer] != plan::Place::kGiven) stored[buffer] = false;
    }
    return stored;
  }

  void add(Mismatch found, const plan::Step& step, const Reference::Value& value) {
    const graph::Node& node = plan_.graph.nodes[value.node];
    found.op = {node.op->name, node.source};
    found.recorded = value.node;
    found.value = value.name;
    if (step.kernel != plan::kNoKernel) {
      found.kernel = kernel_name(plan_, step.kernel);
      for (const uint32_t each : step.nodes) {
        const graph::Node& computed = plan_.program.nodes[each];
        found.fused.emplace_back(computed.op->name, computed.source);
      }
    }
    verified_.mismatches.push_back(std::move(found));
  }

  plan::Plan& plan_;
  plan::Schedule& schedule_;
  const std::span<const int64_t> values_;
  const Reference& reference_;
  Verified& verified_;
  std::unique_ptr<Prepared> prepared_;
  const graph::Graph wide_;  // the program in float64
};

}  // namespace

Outcome verify(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
               std::span<const int64_t> values, Verified* verified) {
  for (const graph::Node& node : plan.graph.nodes) {
    ACC_CHECK(!node.op->communicates, "[torchacc.verify] ", node.op->name,
              " takes part in other processes, and would do so twice. Verify the step of one "
              "process.");
  }
  plan::Schedule& schedule = await_fused(plan, device);
  Outcome outcome;
  outcome.schedule = &schedule;
  Surroundings surroundings(device);
  Reference reference(plan.graph, given);
  reference.run(plan.graph, values, surroundings.ambient);
  verified->operators += plan.graph.nodes.size();
  Verification(plan, schedule, device, values, reference, verified)
      .run(given, device, surroundings.ambient, &outcome);
  std::ranges::stable_sort(verified->mismatches, {}, &Mismatch::recorded);
  return outcome;
}

}  // namespace acc::exec
