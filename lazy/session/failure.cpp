#include "lazy/session/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"

namespace acc::session {
namespace {

// The entry of the group that a node has an exchange with.
runtime::Undone& undone_for(const graph::Graph& graph, const graph::Node& node,
                            std::vector<runtime::Undone>& undone) {
  const int64_t group = graph::exchange_group(graph, node);
  const auto found = std::ranges::find(undone, group, &runtime::Undone::group);
  return found != undone.end() ? *found : undone.emplace_back(group);
}

// Throws `message` as the first of these types that the error is one of.
template <class... Types>
void throw_like(const std::exception& error, const c10::SourceLocation& where,
                const std::string& message) {
  const auto try_type = [&]<class Type>(const Type* same) {
    if (same != nullptr) throw Type(where, message);
  };
  (try_type(dynamic_cast<const Types*>(&error)), ...);
}

}  // namespace

void rethrow_as(const std::exception_ptr& error, bool no_memory, const std::string& message) {
  const c10::SourceLocation where{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (no_memory) throw c10::OutOfMemoryError(where, message);
  try {
    std::rethrow_exception(error);
  } catch (const c10::AcceleratorError& failed) {
    const int32_t code = failed.get_error_code();
    throw c10::AcceleratorError(where, code, message + runtime::advice_after(code));
  } catch (const std::exception& failed) {
    if (runtime::add_note(failed, message)) throw;  // Python's own: an interrupt, say
    throw_like<c10::IndexError, c10::ValueError, c10::TypeError, c10::NotImplementedError,
               c10::LinAlgError, c10::BufferError, c10::DistBackendError, c10::DistNetworkError,
               c10::DistQueueEmptyError, c10::DistStoreError, c10::DistError>(failed, where,
                                                                              message);
    throw base::Error(message);
  }
}

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::string held_text(c10::DeviceIndex device, uint64_t given_back, const char* captured_by) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto held = runtime::backend().memory_stats(device).allocated_bytes[kAll].current;
  std::string text = base::concat("tensors held ", static_cast<uint64_t>(held) / kMiB,
                                  " MiB on acc:", static_cast<int>(device), ".");
  const uint64_t captured = runtime::backend().captured_bytes(device);
  if (given_back + captured > 0) {
    text += base::concat(" Captured steps gave ", given_back / kMiB, " MiB back; ", captured_by,
                         " of theirs that are in use have ", captured / kMiB, " MiB.");
  }
  return text;
}

}  // namespace

std::string memory_held(c10::DeviceIndex device, uint64_t given_back) {
  return " Out of memory: " + held_text(device, given_back, "results");
}

std::string memory_situation(const plan::Plan& plan, const plan::Schedule& schedule,
                             c10::DeviceIndex device, uint64_t given_back) {
  uint64_t results = 0;
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    if (plan.outputs[i]) results += plan.program.buffers[i].nbytes;
  }
  return base::concat(" Out of memory: these ", plan.program.nodes.size(), " operators need ",
                      schedule.arena_bytes / kMiB, " MiB for intermediates and ", results / kMiB,
                      " MiB for results; ", held_text(device, given_back, "this one and results"));
}

void poison_rest(const plan::Plan& plan, const plan::Schedule& schedule, const record::Trace& trace,
                 size_t step, const std::shared_ptr<const record::Poison>& poison) {
  for (; step < schedule.steps.size(); ++step) {
    for (const graph::Use& use : plan::uses(plan, schedule.steps[step])) {
      if (!use.writes) continue;
      const uint32_t first = plan.program.buffers[use.buffer].group;
      if (first >= trace.entries.size()) continue;  // the plan's own
      if (const auto storage = trace.entries[first].storage.lock()) storage->poison = poison;
    }
  }
}

void poison_all(const record::Trace& trace, const std::exception_ptr& error,
                const std::vector<runtime::Undone>& undone) {
  auto poison = std::make_shared<record::Poison>();
  poison->message = base::concat("the work was not done: ", runtime::text_of(error));
  for (size_t i = 0; i < trace.entries.size(); ++i) {
    const record::Entry& entry = trace.entries[i];
    const bool written = trace.followed != nullptr ? trace.followed->buffers[i].written
                                                   : trace.entries[entry.group].written;
    if (entry.kind != graph::BufferKind::kFresh && !written) continue;
    if (const auto storage = entry.storage.lock()) storage->poison = poison;
  }
  runtime::tell_failure(poison->message, undone);
}

std::vector<runtime::Undone> undone_of(const graph::Graph& graph) {
  std::vector<runtime::Undone> undone;
  for (const graph::Node& node : graph.nodes) {
    if (node.op->communicates) ++undone_for(graph, node, undone).exchanges;
  }
  return undone;
}

std::vector<runtime::Undone> undone_of(const plan::Plan& plan, const plan::Schedule& schedule,
                                       size_t failed, bool before) {
  std::vector<runtime::Undone> undone;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const graph::Node& node = plan.program.nodes[schedule.steps[i].nodes[0]];
    if (!node.op->communicates) continue;
    runtime::Undone& of_group = undone_for(plan.program, node, undone);
    if (i > failed || (i == failed && before)) ++of_group.exchanges;
    of_group.broken |= i == failed && !before;
  }
  return undone;
}

}  // namespace acc::session
