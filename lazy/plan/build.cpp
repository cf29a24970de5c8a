#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/base/stats.h"
#include "lazy/graph/draws.h"
#include "lazy/graph/print.h"
#include "lazy/passes/accumulate.h"
#include "lazy/passes/batch.h"
#include "lazy/passes/copies.h"
#include "lazy/passes/cse.h"
#include "lazy/passes/dce.h"
#include "lazy/passes/epilogues.h"
#include "lazy/passes/fuse.h"
#include "lazy/passes/layout.h"
#include "lazy/passes/lists.h"
#include "lazy/passes/products.h"
#include "lazy/passes/recompute.h"
#include "lazy/passes/rows.h"
#include "lazy/passes/split.h"
#include "lazy/passes/switches.h"
#include "lazy/passes/transfers.h"
#include "lazy/passes/widen.h"
#include "lazy/plan/contest.h"
#include "lazy/plan/plan.h"
#include "lazy/plan/print.h"
#include "lazy/plan/schedule.h"

namespace acc::plan {
namespace {

using passes::enabled;
using passes::Pass;

std::vector<Step> one_by_one(const graph::Graph& program) {
  std::vector<Step> steps(program.nodes.size());
  for (uint32_t i = 0; i < steps.size(); ++i) steps[i].nodes = {i};
  return steps;
}

// What a pass made of the program for the time or the memory that its model says this saves.
void take(Plan& plan, graph::Graph program) {
  plan.unproven = plan.unproven || !graph::same(plan.program, program);
  plan.program = std::move(program);
  plan.outputs.resize(plan.program.buffers.size(), false);
}

// Takes over what the pass makes of the program, unless something of it would be computed on its
// own.
void recompute(Plan& plan, std::vector<passes::Cluster>* clusters, bool on_gpu) {
  auto program = passes::recompute(plan.program, *clusters, plan.outputs);
  if (!program.has_value()) return;
  std::vector<passes::Cluster> joined = passes::fuse(*program, on_gpu);
  for (const passes::Cluster& cluster : joined) {
    const bool alone = std::ranges::all_of(
        cluster.nodes, [&](uint32_t node) { return program->nodes[node].again; });
    if (alone) return;
  }
  take(plan, std::move(*program));
  *clusters = std::move(joined);
}

// The nodes that a kernel draws for.
std::vector<uint32_t> drawing_nodes(const Plan& plan, const Step& step) {
  std::vector<uint32_t> found;
  if (step.kernel == kNoKernel) return found;
  std::ranges::copy_if(step.nodes, std::back_inserter(found), [&](uint32_t node) {
    return graph::draws_numbers(*plan.program.nodes[node].op);
  });
  return found;
}

void append_one_by_one(const Step& step, std::vector<Step>* steps) {
  for (const uint32_t node : step.nodes) steps->emplace_back().nodes = {node};
}

}  // namespace

uint64_t Plan::bytes() const {
  // The executor's prepared calls hold about one tensor object per operand, which is the bulk.
  constexpr uint64_t kPreparedBytesPerWord = 40;
  return sizeof(Plan) + graph.bytes() + program.bytes() +
         (unfused.steps.capacity() + fused.steps.capacity()) * sizeof(Step) +
         program.buffers.size() * 2 * (sizeof(Place) + sizeof(uint64_t)) +
         graph.words.size() * kPreparedBytesPerWord +
         (contest == nullptr ? 0 : contest->plain()->bytes());
}

std::shared_ptr<Plan> build(graph::Graph graph, const base::Hash128& key, std::vector<bool> alive,
                            const Options& options, const Observer& observer) {
  const bool fuse = options.fuse;
  const bool on_gpu = options.on_gpu;
  auto plan = std::make_shared<Plan>();
  plan->options = options;
  plan->graph = std::move(graph);
  plan->graph.shrink_to_fit();
  plan->key = key;
  plan->outputs = std::move(alive);
  plan->outputs.resize(plan->graph.buffers.size());  // made anew, without what its passes added

  if (observer) observer("recorded", graph::print(plan->graph));
  std::vector<bool> stays(plan->graph.nodes.size(), true);
  if (enabled(Pass::kDce)) {
    stays = passes::eliminate_dead_code(plan->graph, plan->outputs);
    if (observer) observer("dce", print(plan->graph, stays));
  }
  base::count(base::Counter::NodesRemoved, static_cast<uint64_t>(std::ranges::count(stays, false)));
  plan->program = passes::run_lists_by_item(plan->graph, stays, enabled(Pass::kLists));
  if (observer && enabled(Pass::kLists)) observer("lists", graph::print(plan->program));
  if (fuse && enabled(Pass::kSplit)) {
    take(*plan, passes::split_backwards(plan->program));
    if (observer) observer("split", graph::print(plan->program));
  }
  if (fuse && enabled(Pass::kCse)) {
    plan->program = passes::eliminate_common_calls(plan->program, plan->outputs);
    if (observer) observer("cse", graph::print(plan->program));
  }
  if (fuse && enabled(Pass::kCopies)) {
    plan->program = passes::eliminate_copies(plan->program, plan->outputs);
    if (observer) observer("copies", graph::print(plan->program));
  }
  // Before products are widened: what stands between those would keep them apart.
  if (fuse && enabled(Pass::kRows)) {
    take(*plan, passes::join_rows(plan->program, plan->outputs));
    if (observer) observer("rows", graph::print(plan->program));
  }
  if (!on_gpu && enabled(Pass::kWiden)) {
    plan->program = passes::widen_products(plan->program);
    plan->outputs.resize(plan->program.buffers.size(), false);
    if (observer) observer("widen", graph::print(plan->program));
  }
  if (fuse && enabled(Pass::kLayout)) {
    take(*plan, passes::choose_layouts(plan->program, plan->outputs, on_gpu));
    if (observer) observer("layout", graph::print(plan->program));
  }
  // Before products take part in sums: what they gain is more than a pass over their results.
  if (fuse && enabled(Pass::kProducts)) {
    take(*plan, passes::choose_products(plan->program));
    if (observer) observer("products", graph::print(plan->program));
  }
  if (fuse && enabled(Pass::kAccumulate)) {
    take(*plan, passes::accumulate_products(plan->program, plan->outputs));
    if (observer) observer("accumulate", graph::print(plan->program));
  }
  // After products took part in sums: the gradient of a weight that is added to saves a pass over
  // it, which is more than the sum of the bias.
  if (fuse && on_gpu && enabled(Pass::kEpilogues)) {
    take(*plan, passes::join_epilogues(plan->program, plan->outputs));
    if (observer) observer("epilogues", graph::print(plan->program));
  }
  // Behind all that moves uses of memory, before what moves nodes.
  if (enabled(Pass::kTransfers) && passes::communicates(plan->program)) {
    plan->program = passes::overlap_transfers(plan->program);
    if (observer) observer("transfers", graph::print(plan->program));
  }
  std::vector<passes::Cluster> clusters;
  if (fuse && enabled(Pass::kFuse)) {
    clusters = passes::fuse(plan->program, on_gpu);
    if (observer) observer("fuse", print(plan->program, clusters));
    if (enabled(Pass::kRecompute)) {
      recompute(*plan, &clusters, on_gpu);
      if (observer) observer("recompute", print(plan->program, clusters));
    }
  }
  plan->program.shrink_to_fit();
  plan->unfused = schedule(*plan, one_by_one(plan->program));
  if (!clusters.empty()) {
    for (passes::Batch& batch :
         passes::batch(plan->program, std::move(clusters), plan->outputs, options.alike)) {
      Step& step = plan->fused.steps.emplace_back();
      step.nodes = std::move(batch.nodes);
      if (batch.launches.empty()) continue;
      const auto found = std::ranges::find(plan->kernels, batch.kernel);
      step.kernel = static_cast<uint32_t>(found - plan->kernels.begin());
      if (found == plan->kernels.end()) plan->kernels.push_back(std::move(batch.kernel));
      step.launches = std::move(batch.launches);
    }
    // Kernels are made of clusters even where `batch` does not join launches of several.
    if (observer) observer("batch", print(plan->program, plan->fused.steps));
  }

  const auto& buffers = plan->graph.buffers;
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].written && buffers[i].group != i) plan->overlapping.push_back(i);
  }
  return plan;
}

void use_kernels(Plan& plan, const std::vector<bool>& usable) {
  std::vector<bool> apart;
  apart.reserve(plan.fused.steps.size());
  for (const Step& step : plan.fused.steps) {
    apart.push_back(step.kernel != kNoKernel && !usable[step.kernel]);
  }
  take_apart(plan, apart);
}

void take_apart(Plan& plan, const std::vector<bool>& apart) {
  std::vector<Step> steps;
  for (size_t i = 0; i < apart.size(); ++i) {
    Step& step = plan.fused.steps[i];
    if (apart[i]) {
      append_one_by_one(step, &steps);
    } else {
      steps.push_back(std::move(step));
    }
  }
  plan.fused = schedule(plan, std::move(steps));
}

uint64_t drawn_bytes(const Plan& plan) {
  uint64_t bytes = 0;
  for (const Step& step : plan.fused.steps) {
    for (const uint32_t node : drawing_nodes(plan, step)) {
      for (const graph::Use& use : graph::uses(plan.program, plan.program.nodes[node])) {
        if (use.writes) bytes += static_cast<uint64_t>(use.end_byte - use.first_byte);
      }
    }
  }
  return bytes;
}

void keep_drawing(Plan& plan) {
  std::vector<Step> steps;
  bool any = false;
  for (const Step& step : plan.fused.steps) {
    if (drawing_nodes(plan, step).empty()) {
      append_one_by_one(step, &steps);
    } else {
      steps.push_back(step);
      any = true;
    }
  }
  if (any) plan.unfused = schedule(plan, std::move(steps));
}

}  // namespace acc::plan
