#include "lazy/plan/schedule.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lazy/graph/words.h"
#include "lazy/passes/switches.h"
#include "lazy/plan/in_place.h"
#include "lazy/plan/memory.h"
#include "lazy/plan/order.h"

namespace acc::plan {
namespace {

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// Intermediates from this size on get a block of their own while they live, as in eager mode. In
// the arena their room could not serve the results that operators allocate themselves, and the two
// peaks would add up. Smaller ones stay there: they cost no allocation, and together little memory.
constexpr uint64_t kOwnBlockBytes = 64 << 10;

struct Lifetimes {
  std::vector<uint32_t> first;  // step
  std::vector<uint32_t> last;
  std::vector<bool> adopted;  // the first touch is a result whose memory the operator makes
};

// A single result of an operator with a native out kernel can be written where the plan wants it.
bool takes_place(const graph::Graph& graph, const graph::Node& node) {
  if (node.op->out_handle == nullptr) return false;
  const auto results = graph.results(node);
  return !results.empty() && graph::tag_of(results[0]) == graph::Tag::kTensor &&
         graph::item_words(results.data()) == results.size();
}

Lifetimes find_lifetimes(const Plan& plan, const std::vector<Step>& steps) {
  const size_t n = plan.program.buffers.size();
  Lifetimes lifetimes{std::vector<uint32_t>(n, kNever), std::vector<uint32_t>(n, 0),
                      std::vector<bool>(n)};
  for (uint32_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    const bool places_results =
        step.kernel != kNoKernel || takes_place(plan.program, plan.program.nodes[step.nodes[0]]);
    for (const graph::Use& use : uses(plan, step)) {
      if (lifetimes.first[use.buffer] == kNever) {
        lifetimes.first[use.buffer] = i;
        lifetimes.adopted[use.buffer] = use.fresh && !places_results;
      }
      lifetimes.last[use.buffer] = i;
    }
  }
  return lifetimes;
}

// Lets buffers with blocks of their own take over those of buffers that end where they begin.
void write_in_place(const Plan& plan, const Lifetimes& lifetimes, Schedule* made) {
  const auto& buffers = plan.program.buffers;
  std::vector<bool> shared(buffers.size(), false);  // has a storage with others
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].group != i) shared[i] = shared[buffers[i].group] = true;
  }
  for (uint32_t i = 0; i < made->steps.size(); ++i) {
    Step& step = made->steps[i];
    std::vector<uint32_t> allocate;
    const std::vector<graph::Use> all = uses(plan, step);
    for (const uint32_t buffer : step.allocate) {
      const auto fits = [&](const graph::Use& use) {
        const uint32_t of = use.buffer;
        const bool block =
            made->places[of] == Place::kAllocated || made->places[of] == Place::kAdopted;
        return block && !plan.outputs[of] && !shared[of] && !shared[buffer] &&
               lifetimes.first[of] < i && lifetimes.last[of] == i &&
               buffers[of].nbytes == buffers[buffer].nbytes &&
               std::ranges::find(step.reuse, of, &Reuse::of) == step.reuse.end() &&
               may_overwrite(plan, step, buffer, of);
      };
      const auto found = std::ranges::find_if(all, fits);
      if (found == all.end()) {
        allocate.push_back(buffer);
      } else {
        step.reuse.push_back({buffer, found->buffer});
      }
    }
    step.allocate = std::move(allocate);
  }
}

}  // namespace

std::vector<graph::Use> uses(const Plan& plan, const Step& step) {
  if (step.kernel == kNoKernel) {
    return graph::uses(plan.program, plan.program.nodes[step.nodes[0]]);
  }
  std::vector<graph::Use> all;
  for (const passes::Launch& launch : step.launches) {
    for (const passes::Launch::Operand& operand : launch.operands) {
      graph::Use& use = all.emplace_back();
      use.buffer = operand.buffer;
      use.reads = true;
      use.writes = operand.stored;
    }
  }
  return all;
}

Schedule schedule(const Plan& plan, std::vector<Step> steps) {
  const auto& buffers = plan.program.buffers;
  if (passes::enabled(passes::Pass::kOrder)) steps = order_steps(plan, std::move(steps));
  const Lifetimes lifetimes = find_lifetimes(plan, steps);
  Schedule made;
  made.places.assign(buffers.size(), Place::kNowhere);
  made.offsets.assign(buffers.size(), 0);
  for (Step& step : steps) {
    step.allocate.clear();
    step.reuse.clear();
    step.release.clear();
  }
  std::vector<Lifetime> arena;
  std::vector<uint32_t> in_arena;
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    const bool touched = lifetimes.first[i] != kNever;
    if (!touched) continue;
    if (buffers[i].kind != graph::BufferKind::kFresh) {
      // Released after the last use too: an activation that only this step still holds need not
      // live until its end.
      made.places[i] = Place::kGiven;
      steps[lifetimes.last[i]].release.push_back(i);
      continue;
    }
    if (lifetimes.adopted[i]) {
      made.places[i] = Place::kAdopted;
    } else if (plan.outputs[i] || buffers[i].nbytes >= kOwnBlockBytes) {
      made.places[i] = Place::kAllocated;
      steps[lifetimes.first[i]].allocate.push_back(i);
    } else {
      made.places[i] = Place::kArena;
      arena.push_back({buffers[i].nbytes, lifetimes.first[i], lifetimes.last[i]});
      in_arena.push_back(i);
    }
    if (!plan.outputs[i] && made.places[i] != Place::kArena) {
      steps[lifetimes.last[i]].release.push_back(i);
    }
  }
  const Layout layout = plan_memory(arena);
  for (size_t i = 0; i < in_arena.size(); ++i) made.offsets[in_arena[i]] = layout.offsets[i];
  made.arena_bytes = layout.bytes;
  made.steps = std::move(steps);
  if (passes::enabled(passes::Pass::kAlias)) write_in_place(plan, lifetimes, &made);
  return made;
}

}  // namespace acc::plan
