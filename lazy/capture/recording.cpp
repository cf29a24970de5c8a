#include "lazy/capture/recording.h"

#include <algorithm>
#include <exception>

#include "csrc/base/check.h"
#include "csrc/runtime/errors.h"
#include "lazy/capture/text.h"
#include "lazy/graph/draws.h"
#include "lazy/record/source.h"

namespace acc::capture {

void Recording::note(const record::Trace& trace, const std::shared_ptr<plan::Plan>& of,
                     const std::vector<bool>& held, c10::DeviceIndex device) {
  plan = of;
  graph = of->graph;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    graph.nodes[i].source = i < trace.places.size() ? trace.places[i] : 0;
  }
  entries = trace.entries;
  values = trace.values;
  alive = held;
  try {
    for (size_t i = 0; i < entries.size(); ++i) {
      record::Entry& entry = entries[i];
      const record::LazyStorage* storage = entry.storage._unsafe_get_target();
      born.push_back(storage == nullptr || record::was_born(storage));
      if (!born[i]) entry.memory = c10::Storage();
      if (!entry.memory) continue;
      if (entry.group != i) {
        entry.memory = entries[entry.group].memory;
      } else if (graph.buffers[i].written || !entry.storage.expired()) {
        // The plan is about to change it, or whoever keeps it may do so later.
        entry.memory = copy_of(entry.memory, device);
      }
    }
  } catch (...) {  // for want of memory, which the step itself may find
    entries.clear();
    lost = runtime::text_of(std::current_exception());
  }
}

void check_whole(const Recording& recording) {
  if (!recording.cuts.empty()) {
    const record::Cut& cut = recording.cuts.front();
    ACC_FAIL("[torchacc.capture] the step cannot be replayed: it ", cut_text(cut),
             record::source_text(cut.source), cut_advice(cut.reason));
  }
  ACC_CHECK(recording.lost.empty(), "[torchacc.capture] the step cannot be replayed: what call ",
            recording.call, " copied from the host could not be kept (", recording.lost,
            "). Free memory, and capture it again.");
  ACC_CHECK(recording.devices > 0,
            "[torchacc.capture] the function recorded nothing on acc. Move its model and its "
            "arguments to acc.");
  ACC_CHECK(recording.devices == 1, "[torchacc.capture] the step uses ", recording.devices,
            " acc devices. Capture what each of them does by itself.");
}

namespace {

void compare_graphs(const Recording& a, const Recording& b) {
  const graph::Graph& before = a.graph;
  const graph::Graph& now = b.graph;
  if (a.plan == b.plan || graph::same(before, now)) return;
  size_t at = 0;
  const size_t common = std::min(before.nodes.size(), now.nodes.size());
  while (at < common && same_node(before, now, at)) ++at;
  const auto text = [&](const graph::Graph& graph) {
    return at < graph.nodes.size() ? node_text(graph.nodes[at]) : std::string("its end");
  };
  const bool same_op = at < common && before.nodes[at].op == now.nodes[at].op;
  ACC_FAIL("[torchacc.capture] the step is not the same at each call: operator ", at, " of call ",
           a.call, " is ", text(before), ", that of call ", b.call, " is ", text(now),
           same_op ? ", with other shapes, tensors or settings" : "",
           ". Give `warmup` more calls if it settles, and keep what changes out of the function.");
}

}  // namespace

void compare(const Recording& before, const Recording& latest) {
  compare_graphs(before, latest);
  const graph::Graph& graph = latest.graph;
  for (const graph::Node& node : graph.nodes) {
    const uint32_t own = node.n_values - (graph::draws_numbers(*node.op) ? 2 : 0);
    for (uint32_t i = 0; i < own; ++i) {
      const int64_t was = before.values[node.values + i];
      const int64_t is = latest.values[node.values + i];
      if (was == is) continue;
      const Number number = number_of(graph, node, i);
      ACC_FAIL("[torchacc.capture] ", node_text(node), ": the number '", number.argument, "' was ",
               number_text(number, was), " in call ", before.call, " and is ",
               number_text(number, is), " in call ", latest.call,
               ". Python computes it anew, which a replay does not. For an optimizer pass "
               "capturable=True and a learning rate that is a tensor on acc; for anything else "
               "pass the number to the function as a tensor, or keep it in one.");
    }
  }
}

std::string node_text(const graph::Node& node) {
  return node.op->name + record::source_text(node.source);
}

std::string buffer_text(const graph::Graph& graph, uint32_t buffer) {
  for (const graph::Node& node : graph.nodes) {
    for (const graph::Use& use : graph::uses(graph, node)) {
      if (use.buffer == buffer) {
        return base::concat("a tensor that ", node.op->name, use.writes ? " writes" : " reads",
                            record::source_text(node.source));
      }
    }
  }
  return "a tensor of the step";
}

}  // namespace acc::capture
