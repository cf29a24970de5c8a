#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/hash.h"
#include "lazy/graph/graph.h"

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

struct Step {
  uint32_t node = 0;               // of the program
  std::vector<uint32_t> allocate;  // buffers to allocate before the step
  std::vector<uint32_t> release;   // buffers that nobody needs after it
};

struct Plan {
  graph::Graph graph;  // as recorded, before any pass
  graph::Graph
      program;  // what is run: the graph after the passes, over the same buffers and values
  base::Hash128 key;
  std::vector<bool> outputs;  // per buffer: kept for the user at the end
  std::vector<Step> steps;
  std::vector<Place> places;      // per buffer
  std::vector<uint64_t> offsets;  // per buffer, in the arena
  uint64_t arena_bytes = 0;
  // Buffers of a written group with more than one member: how they overlap is part of the plan.
  std::vector<uint32_t> overlapping;

  // What the executor prepared at the first run.
  std::shared_ptr<void> prepared;
  // The plan that ran after this one the last time.
  std::weak_ptr<Plan> next;

  uint64_t bytes() const;
};

// Builds the plan of a recorded step. `alive`: per buffer, whether the user can reach it at the
// end.
std::shared_ptr<Plan> build(graph::Graph graph, const base::Hash128& key, std::vector<bool> alive);

}  // namespace acc::plan
