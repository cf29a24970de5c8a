#include "lazy/session/planning.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/runtime/ambient.h"
#include "lazy/exec/kernels.h"
#include "lazy/graph/print.h"
#include "lazy/session/replay.h"
#include "lazy/session/session.h"

namespace acc::session {

namespace {

std::atomic<bool> fuses{true};

}  // namespace

std::string kernels_problem() { return exec::kernels_problem(); }

std::vector<exec::MissedKernel> missed_kernels(size_t from) {
  return fuses ? exec::missed_kernels(from) : std::vector<exec::MissedKernel>();
}

bool relies_on_kernel(const std::string& name) { return fuses && exec::relies_on_kernel(name); }

bool stop_fusing() { return fuses.exchange(false); }

std::shared_ptr<plan::Plan> make_plan(graph::Graph graph, const base::Hash128& key,
                                      std::vector<bool> alive, const plan::Options& wish,
                                      const plan::Observer& observer) {
  plan::Options options = wish;
  options.fuse = wish.fuse && fuses && base::env::fuses();
  options.on_gpu = exec::for_gpus();
  options.alike = runtime::chooses_alike();
  return plan::build(std::move(graph), key, std::move(alive), options, observer);
}

bool covers(const std::vector<bool>& outputs, const std::vector<bool>& alive) {
  for (size_t i = 0; i < alive.size(); ++i) {
    if (alive[i] && !outputs[i]) return false;
  }
  return true;
}

std::vector<bool> alive_buffers(const record::Trace& trace) {
  std::vector<bool> alive(trace.entries.size());
  for (size_t i = 0; i < alive.size(); ++i) {
    const record::Entry& entry = trace.entries[i];
    alive[i] = entry.kind == graph::BufferKind::kFresh && !entry.storage.expired();
  }
  return alive;
}

bool keeps_alive(const plan::Plan& plan, const record::Trace& trace) {
  for (size_t i = 0; i < trace.entries.size(); ++i) {
    if (trace.entries[i].kind == graph::BufferKind::kFresh && !plan.outputs[i] &&
        !trace.entries[i].storage.expired()) {
      return false;
    }
  }
  return true;
}

bool overlaps_as_planned(const plan::Plan& plan, const record::Trace& trace) {
  for (const uint32_t buffer : plan.overlapping) {
    const record::Entry& entry = trace.entries[buffer];
    if (entry.byte_offset - trace.entries[entry.group].byte_offset !=
        plan.graph.buffers[buffer].group_offset) {
      return false;
    }
  }
  return true;
}

void dump(const plan::Plan& plan) {
  using base::env::Dump;
  if (base::env::dump() != Dump::Graph && base::env::dump() != Dump::Plan) return;
  const bool program = base::env::dump() == Dump::Plan;
  std::fputs(graph::print(program ? plan.program : plan.graph).c_str(), stderr);
}

plan::Observer pass_observer() {
  if (base::env::dump() != base::env::Dump::Passes) return nullptr;
  return [](const char* pass, const std::string& graph) {
    const bool after = std::strcmp(pass, "recorded") != 0;
    std::fputs(base::concat("== ", after ? "after " : "", pass, "\n", graph).c_str(), stderr);
  };
}

}  // namespace acc::session
