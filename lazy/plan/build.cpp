#include <algorithm>
#include <limits>

#include "csrc/base/stats.h"
#include "lazy/graph/words.h"
#include "lazy/passes/dce.h"
#include "lazy/passes/lists.h"
#include "lazy/plan/memory.h"
#include "lazy/plan/plan.h"

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
bool writes_in_place(const graph::Graph& graph, const graph::Node& node) {
  if (node.op->out_handle == nullptr) return false;
  const auto results = graph.results(node);
  return !results.empty() && graph::tag_of(results[0]) == graph::Tag::kTensor &&
         graph::item_words(results.data()) == results.size();
}

Lifetimes find_lifetimes(const Plan& plan) {
  const size_t n = plan.program.buffers.size();
  Lifetimes lifetimes{std::vector<uint32_t>(n, kNever), std::vector<uint32_t>(n, 0),
                      std::vector<bool>(n)};
  for (uint32_t step = 0; step < plan.steps.size(); ++step) {
    const graph::Node& node = plan.program.nodes[plan.steps[step].node];
    for (const graph::Use& use : graph::uses(plan.program, node)) {
      if (lifetimes.first[use.buffer] == kNever) {
        lifetimes.first[use.buffer] = step;
        lifetimes.adopted[use.buffer] = use.fresh && !writes_in_place(plan.program, node);
      }
      lifetimes.last[use.buffer] = step;
    }
  }
  return lifetimes;
}

}  // namespace

uint64_t Plan::bytes() const {
  // The executor's prepared calls hold about one tensor object per operand, which is the bulk.
  constexpr uint64_t kPreparedBytesPerWord = 40;
  return sizeof(Plan) + graph.bytes() + program.bytes() + steps.capacity() * sizeof(Step) +
         places.capacity() * (sizeof(Place) + sizeof(uint64_t)) +
         graph.words.size() * kPreparedBytesPerWord;
}

std::shared_ptr<Plan> build(graph::Graph graph, const base::Hash128& key, std::vector<bool> alive) {
  auto plan = std::make_shared<Plan>();
  plan->graph = std::move(graph);
  plan->graph.shrink_to_fit();
  plan->key = key;
  plan->outputs = std::move(alive);
  const auto& buffers = plan->graph.buffers;

  const auto stays = passes::eliminate_dead_code(plan->graph, plan->outputs);
  base::count(base::Counter::NodesRemoved, static_cast<uint64_t>(std::ranges::count(stays, false)));
  plan->program = passes::run_lists_by_item(plan->graph, stays);
  plan->program.shrink_to_fit();
  plan->steps.reserve(plan->program.nodes.size());
  for (uint32_t i = 0; i < plan->program.nodes.size(); ++i) plan->steps.push_back({i, {}, {}});

  const Lifetimes lifetimes = find_lifetimes(*plan);
  plan->places.assign(buffers.size(), Place::kNowhere);
  plan->offsets.assign(buffers.size(), 0);
  std::vector<Lifetime> arena;
  std::vector<uint32_t> in_arena;
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    const bool touched = lifetimes.first[i] != kNever;
    if (!touched) continue;
    if (buffers[i].kind != graph::BufferKind::kFresh) {
      // Released after the last use too: an activation that only this step still holds need not
      // live until its end.
      plan->places[i] = Place::kGiven;
      plan->steps[lifetimes.last[i]].release.push_back(i);
      continue;
    }
    if (lifetimes.adopted[i]) {
      plan->places[i] = Place::kAdopted;
    } else if (plan->outputs[i] || buffers[i].nbytes >= kOwnBlockBytes) {
      plan->places[i] = Place::kAllocated;
      plan->steps[lifetimes.first[i]].allocate.push_back(i);
    } else {
      plan->places[i] = Place::kArena;
      arena.push_back({buffers[i].nbytes, lifetimes.first[i], lifetimes.last[i], 0});
      in_arena.push_back(i);
    }
    if (!plan->outputs[i] && plan->places[i] != Place::kArena) {
      plan->steps[lifetimes.last[i]].release.push_back(i);
    }
  }
  const Layout layout = plan_memory(arena);
  for (size_t i = 0; i < in_arena.size(); ++i) plan->offsets[in_arena[i]] = layout.offsets[i];
  if (!layout.lane_bytes.empty()) plan->arena_bytes = layout.lane_bytes[0];

  for (uint32_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].written && buffers[i].group != i) plan->overlapping.push_back(i);
  }
  base::count(base::Counter::PlansBuilt);
  return plan;
}

}  // namespace acc::plan
