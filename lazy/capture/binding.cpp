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

bool is_in(const Entry& entry, const Given& tensor) {
  return entry.storage._unsafe_get_target() == tensor.storage._unsafe_get_target();
}

bool share(const Given& a, const Given& b) {
  return a.storage._unsafe_get_target() == b.storage._unsafe_get_target();
}

size_t index_of(const Recording& recording, const Entry* entry) {
  return static_cast<size_t>(entry - recording.entries.data());
}

class Binder {
 public:
  Binder(const Recording& before, const Recording& latest, const std::vector<at::Tensor>& arguments)
      : before_(before), latest_(latest), graph_(latest.graph), arguments_(arguments) {}

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
    const Given& before = before_.arguments[k];
    LazyStorage* storage = record::storage_of(arguments_[k]);
    if (before.storage._unsafe_get_target() == storage) argument.stayed = weak(storage);
    argument.moved = before.first_byte != first_byte(arguments_[k]);
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
      if (storage != nullptr && graph_.buffers[i].group == i && !entry.storage.expired()) {
        binding.storage = entry.storage;
        binding.nbytes = storage->nbytes();
      }
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
    const Entry& before = before_.entries[i];
    bool found = false;
    for (size_t k = 0; k < arguments_.size(); ++k) {
      // Something else may have been given as this argument only now.
      if (!is_in(before, before_.arguments[k]) || !is_in(entry, latest_.arguments[k])) continue;
      const int64_t distance = entry.byte_offset - latest_.arguments[k].first_byte;
      // What lies in its memory, and does not move with it, is something else.
      if (before.byte_offset - before_.arguments[k].first_byte != distance) continue;
      if (graph_.buffers[i].written) made_.arguments[k].written = true;
      if (found) continue;
      found = true;
      Binding& binding = made_.buffers[i];
      binding.kind = Kind::kArgument;
      binding.argument = static_cast<uint32_t>(k);
      binding.byte_offset = distance;
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
    const size_t r = made_.results.size();
    const Given& now = latest_.results[r];
    // With another number of them, who compares what the function returned says so.
    const Given& before = r < before_.results.size() ? before_.results[r] : now;
    Result result;
    result.geometry = now.geometry;
    LazyStorage* storage = record::storage_of(tensor);
    const auto differs = [&](const char* what, const auto& was, const auto& is) {
      ACC_FAIL("[torchacc.capture] result ", r, " has ", what, " ", was, " in call ", before_.call,
               " and ", is, " in call ", latest_.call, ". Return the same view always.");
    };
    const Geometry& old = before.geometry;
    if (now.geometry.dtype != old.dtype) {
      differs("dtype", c10::toString(old.dtype), c10::toString(now.geometry.dtype));
    }
    const auto check = [&](const char* what, c10::IntArrayRef was, c10::IntArrayRef is) {
      if (was != is) differs(what, was, is);
    };
    check("shape", old.sizes, now.geometry.sizes);
    check("strides", old.strides, now.geometry.strides);
    for (size_t k = 0; k < arguments_.size(); ++k) {
      const Given& argument = latest_.arguments[k];
      const Given& earlier = before_.arguments[k];
      const int64_t distance = now.first_byte - argument.first_byte;
      if (!share(now, argument) || !share(before, earlier) ||
          before.first_byte - earlier.first_byte != distance) {
        continue;
      }
      result.kind = Kind::kArgument;
      result.index = static_cast<uint32_t>(k);
      result.distance = distance;
      result.storage = weak(storage);
      return result;
    }
    if (now.first_byte != before.first_byte) {
      differs("its beginning at byte", before.first_byte, now.first_byte);
    }
    if (const Entry* made = made_in(latest_, storage)) {
      result.index = static_cast<uint32_t>(index_of(latest_, made));
      const Entry* earlier = made_in(before_, before.storage._unsafe_get_target());
      ACC_CHECK(
          &before == &now || (earlier != nullptr && index_of(before_, earlier) == result.index),
          "[torchacc.capture] result ", r, " of the function is ",
          buffer_text(graph_, result.index), " in call ", latest_.call,
          ", and something else in call ", before_.call, ". Return the same always.");
      return result;
    }
    ACC_CHECK(share(before, now) && !record::was_born(storage), "[torchacc.capture] result ", r,
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

Bindings bindings_of(const Recording& before, const Recording& latest,
                     const std::vector<at::Tensor>& arguments,
                     const std::vector<at::Tensor>& results) {
  return Binder(before, latest, arguments).bind(results);
}

}  // namespace acc::capture
