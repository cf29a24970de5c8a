#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/hash.h"
#include "kernels/codegen/kernel_spec.h"
#include "lazy/graph/graph.h"
#include "lazy/passes/lower.h"

// What is run, and run again: a step's nodes in order, where each buffer lives and when it dies.
namespace acc::plan {

enum class Place : uint8_t {
  kGiven,      // an input or a snapshot: the caller's memory
  kArena,      // a small intermediate at a planned offset of the arena
  kAllocated,  // a block of its own, made before the first step that touches it: outputs, and
               // intermediates too large for the arena
  kAdopted,    // whatever memory the operator returns
  kNowhere,    // no step that stays touches it
};

inline constexpr uint32_t kNoKernel = UINT32_MAX;

// A buffer that takes the memory of another, which ends in the step that makes it.
struct Reuse {
  uint32_t buffer = 0;
  uint32_t of = 0;

  bool operator==(const Reuse&) const = default;
};

struct Step {
  std::vector<uint32_t> nodes;           // of the program, in order; a single one without a kernel
  uint32_t kernel = kNoKernel;           // of the plan
  std::vector<passes::Launch> launches;  // of the kernel, in any order: independent of each other
  std::vector<uint32_t> allocate;        // buffers to allocate before the step
  std::vector<Reuse> reuse;              // buffers that it makes in place of others
  std::vector<uint32_t> release;         // buffers that nobody needs after it
};

// Steps in order, and the memory that this order needs.
struct Schedule {
  std::vector<Step> steps;
  std::vector<Place> places;      // per buffer
  std::vector<uint64_t> offsets;  // per buffer, in the arena
  uint64_t arena_bytes = 0;

  // What the executor prepared at the first run.
  std::shared_ptr<void> prepared;
  // And what it has captured, from the second run on.
  std::shared_ptr<void> captures;

  // Per step, in the fastest of the runs that were timed; empty when none was.
  std::vector<double> seconds;
  uint32_t timed_runs = 0;
};

class Contest;
class Trial;

// What a plan is made for.
struct Options {
  bool fuse = true;  // look for kernels
  // Whether kernels take large reductions in parts (lazy/passes/fuse.h), products have epilogues
  // (lazy/passes/epilogues.h), and layouts have a GPU's prices (lazy/passes/layout.h).
  bool on_gpu = false;
  // Whether kernels compute the same whatever of their results this process keeps: other processes
  // update the same parameters, and keep others.
  bool alike = false;
};

struct Plan {
  graph::Graph graph;  // as recorded, before any pass
  // What is run: the graph after the passes, over the same values. Its buffers are those of the
  // graph, and behind them what passes added.
  graph::Graph program;
  base::Hash128 key;
  Options options;
  // Before it runs again it is to be made anew, with its operators as they were recorded: no kernel
  // could be made, or it was slower than that.
  bool to_be_plain = false;
  // Whether passes changed the program for what a model says that it gains. To be compared with the
  // plain form once the kernels are chosen.
  bool unproven = false;
  std::vector<bool> outputs;  // per buffer of the program: kept for the user at the end
  // Buffers of a written group with more than one member: how they overlap is part of the plan.
  std::vector<uint32_t> overlapping;

  Schedule unfused;                          // the program, node by node
  std::vector<codegen::KernelSpec> kernels;  // for the steps that can be fused; empty: none can
  Schedule fused;                            // with those of the kernels that are available
  std::shared_ptr<void> compilation;         // the executor's, of the kernels
  std::shared_ptr<Trial> trial;              // of the kernels against what they replace, meanwhile
  std::shared_ptr<Contest> contest;          // of the plan against its plain form, meanwhile
  bool compared = false;                     // takes part in a contest: its runs are timed
  // Whether the plan is sure to run again: it has come before, or the program is in a training
  // loop. Others come by the hundred in notebooks and never again, and would keep compilers busy.
  bool repeats = false;
  bool has_run = false;  // to its end
  // Threads that ran it so, step by step; the first few (lazy/exec/runner.cpp).
  std::vector<uint64_t> run_by;

  // The plan that ran after this one the last time.
  std::weak_ptr<Plan> next;

  uint64_t bytes() const;
};

// Told of the graph as it was recorded ("recorded"), and of each pass after it ran: its name and
// the graph as text, in the form of lazy/graph/print.h. Passes that are left out are not told.
using Observer = std::function<void(const char* pass, const std::string& graph)>;

// Builds the plan of a recorded step. `alive`: per buffer, whether the user can reach it at the
// end.
std::shared_ptr<Plan> build(graph::Graph graph, const base::Hash128& key, std::vector<bool> alive,
                            const Options& options, const Observer& observer = nullptr);

// Makes the fused schedule anew, with the kernels that are `usable`: what would need another one
// runs node by node.
void use_kernels(Plan& plan, const std::vector<bool>& usable);

// Makes the fused schedule anew: those of its steps that are in `apart` run node by node.
void take_apart(Plan& plan, const std::vector<bool>& apart);

// Bytes of the random numbers that kernels of the fused schedule draw.
uint64_t drawn_bytes(const Plan& plan);

// Makes the unfused schedule anew: of the fused one's kernels it has those that draw.
void keep_drawing(Plan& plan);

// The buffers that a step touches.
std::vector<graph::Use> uses(const Plan& plan, const Step& step);

}  // namespace acc::plan
