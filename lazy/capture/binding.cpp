#include "lazy/capture/binding.h"

#include <algorithm>

#include "csrc/base/check.h"

namespace acc::capture {
namespace {

using record::Entry;
using record::LazyStorage;
using Kind = Binding::Kind;

// What a call made in this storage.
const Entry* made_in(const Recording& recording, const LazyStorage* storage) {
  const auto found = std::ranges::find_if(recording.entries, [&](const Entry& each) {
    return each.kind == graph::BufferKind::kFresh && each.storage._unsafe_get_target() == storage;
  });
  return found == recording.entries.end() ? nullptr : &*found;
}

size_t index_of(const Recording& recording, const Entry* entry) {
  return static_cast<size_t>(entry - recording.entries.data());
}

class Binder {
 public:
  Binder(const Recording& before, const Recording& latest, const graph::Graph& graph,
         const std::vector<at::Tensor>& arguments)
      : before_(before), latest_(latest), graph_(graph), arguments_(arguments) {}

  Bindings bind(const std::vector<at::Tensor>& results) {
    for (size_t k = 0; k < arguments_.size(); ++k) made_.arguments.push_back(argument(k));
    made_.buffers.resize(graph_.buffers.size());
    for (const graph::Node& node : graph_.nodes) {
      for (const graph::Use& use : graph::uses(graph_, node)) {
        Binding& binding = made_.buffers[use.buffer];
        binding.reach = std::max(binding.reach, use.end_byte);
      }
    }
    for (uint32_t i = 0; i < made_.buffers.size(); ++i) bind_buffer(i);
    for (const at::Tensor& each : results) made_.results.push_back(result(each));
    return std::move(made_);
  }

 private:
  Argument argument(size_t k) const {
    Argument argument;
    argument.geometry = geometry_of(arguments_[k]);
    const auto first = std::ranges::find_if(
        arguments_, [&](const at::Tensor& other) { return other.is_alias_of(arguments_[k]); });
    argument.same = static_cast<uint32_t>(first - arguments_.begin());
    argument.distance = first_byte(arguments_[k]) - first_byte(*first);
    LazyStorage* storage = record::storage_of(arguments_[k]);
    if (before_.arguments[k]._unsafe_get_target() == storage) argument.stayed = weak(storage);
    return argument;
  }

  void bind_buffer(uint32_t i) {
    Binding& binding = made_.buffers[i];
    const Entry& entry = latest_.entries[i];
    LazyStorage* storage = entry.storage._unsafe_get_target();
    if (entry.kind == graph::BufferKind::kFresh) {
      if (!latest_.alive[i]) return;
      ACC_CHECK(latest_.born[i], "[torchacc.capture] ", buffer_text(graph_, i),
                " was made before the call and never written. Write it, or make it in the "
                "function.");
      binding.storage = entry.storage;
      binding.nbytes = storage->nbytes();
    } else if (entry.kind == graph::BufferKind::kHost || latest_.born[i]) {
      const c10::Storage& before = before_.entries[i].memory;
      binding.kind = Kind::kConstant;
      binding.byte_offset = entry.byte_offset;
      binding.memory = entry.memory;
      ACC_CHECK(before && entry.memory && same_contents(before, entry.memory),
                "[torchacc.capture] ", buffer_text(graph_, i),
                " comes from the host with other contents at each call, which a replay would not "
                "see. Pass it to the function as an argument.");
    } else if (!bind_argument(i)) {
      bind_state(i);
    }
  }

  bool bind_argument(uint32_t i) {
    const Entry& entry = latest_.entries[i];
    bool found = false;
    for (size_t k = 0; k < arguments_.size(); ++k) {
      if (record::storage_of(arguments_[k]) != entry.storage._unsafe_get_target()) continue;
      // Something else that was given as this argument only now.
      if (before_.arguments[k]._unsafe_get_target() !=
          before_.entries[i].storage._unsafe_get_target()) {
        continue;
      }
      if (graph_.buffers[i].written) made_.arguments[k].written = true;
      if (found) continue;
      found = true;
      Binding& binding = made_.buffers[i];
      binding.kind = Kind::kArgument;
      binding.argument = static_cast<uint32_t>(k);
      binding.byte_offset = entry.byte_offset - first_byte(arguments_[k]);
    }
    return found;
  }

  void bind_state(uint32_t i) {
    Binding& binding = made_.buffers[i];
    const Entry& entry = latest_.entries[i];
    const Entry& before = before_.entries[i];
    const LazyStorage* storage = entry.storage._unsafe_get_target();
    binding.kind = Kind::kState;
    binding.byte_offset = entry.byte_offset;
    if (before.storage._unsafe_get_target() == storage) {
      ACC_CHECK(entry.byte_offset == before.byte_offset, "[torchacc.capture] ",
                buffer_text(graph_, i), " begins at byte ", before.byte_offset,
                " of its storage in call ", before_.call, " and at byte ", entry.byte_offset,
                " in call ", latest_.call, ". Pass what moves to the function as an argument.");
      binding.storage = entry.storage;
      binding.nbytes = storage->nbytes();
      return;
    }
    // What the call before left and this one took up: from now on, what the last one left.
    const Entry* left = made_in(before_, storage);
    const size_t index = left == nullptr ? 0 : index_of(before_, left);
    ACC_CHECK(left != nullptr && latest_.alive[index], "[torchacc.capture] ",
              buffer_text(graph_, i),
              " is another tensor at each call. Pass it to the function as an argument, or keep it "
              "in one tensor that is written in place.");
    binding.storage = latest_.entries[index].storage;
    binding.nbytes = graph_.buffers[index].nbytes;
  }

  Result result(const at::Tensor& tensor) const {
    Result result;
    result.geometry = geometry_of(tensor);
    LazyStorage* storage = record::storage_of(tensor);
    const auto argument = std::ranges::find_if(
        arguments_, [&](const at::Tensor& each) { return each.is_alias_of(tensor); });
    if (argument != arguments_.end()) {
      result.kind = Kind::kArgument;
      result.index = static_cast<uint32_t>(argument - arguments_.begin());
      result.distance = first_byte(tensor) - first_byte(*argument);
      result.storage = weak(storage);
      return result;
    }
    if (const Entry* made = made_in(latest_, storage)) {
      result.index = static_cast<uint32_t>(index_of(latest_, made));
      return result;
    }
    const size_t r = made_.results.size();
    ACC_CHECK(r < before_.results.size() && before_.results[r]._unsafe_get_target() == storage &&
                  !record::was_born(storage),
              "[torchacc.capture] result ", r,
              " of the function is none of its arguments, nothing that it computed, and another "
              "tensor at each call. Return what the step computes.");
    result.kind = Kind::kState;
    result.storage = weak(storage);
    return result;
  }

  const Recording& before_;
  const Recording& latest_;
  const graph::Graph& graph_;
  const std::vector<at::Tensor>& arguments_;
  Bindings made_;
};

}  // namespace

Bindings bindings_of(const Recording& before, const Recording& latest, const graph::Graph& graph,
                     const std::vector<at::Tensor>& arguments,
                     const std::vector<at::Tensor>& results) {
  return Binder(before, latest, graph, arguments).bind(results);
}

}  // namespace acc::capture
