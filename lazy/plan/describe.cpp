#include "lazy/plan/describe.h"

#include <algorithm>

#include "lazy/graph/print.h"
#include "lazy/plan/plan.h"

namespace acc::plan {
namespace {

const char* name_of(graph::BufferKind kind) {
  switch (kind) {
    case graph::BufferKind::kInput:
      return "input";
    case graph::BufferKind::kHost:
      return "host";
    case graph::BufferKind::kFresh:
      break;
  }
  return "fresh";
}

const char* name_of(Place place) {
  switch (place) {
    case Place::kGiven:
      return "given";
    case Place::kArena:
      return "arena";
    case Place::kAllocated:
      return "own";
    case Place::kAdopted:
      return "adopted";
    case Place::kNowhere:
      break;
  }
  return "none";
}

void add_once(uint32_t buffer, std::vector<uint32_t>* buffers) {
  if (std::ranges::find(*buffers, buffer) == buffers->end()) buffers->push_back(buffer);
}

class Describer {
 public:
  Describer(const Plan& plan, const Schedule& schedule) : plan_(plan), schedule_(schedule) {}

  Description run() {
    made_.recorded = plan_.graph.nodes.size();
    made_.arena_bytes = schedule_.arena_bytes;
    made_.timed_runs = schedule_.timed_runs;
    made_.waits_for_kernels = !plan_.kernels.empty() && &schedule_ != &plan_.fused;
    add_kernels();
    add_buffers();
    add_nodes();
    add_steps();
    add_lifetimes();
    add_held_bytes();
    return std::move(made_);
  }

 private:
  void add_kernels() {
    for (const codegen::KernelSpec& kernel : plan_.kernels) {
      made_.kernels.push_back({static_cast<uint32_t>(kernel.instructions.size()),
                               static_cast<uint32_t>(kernel.operands.size())});
    }
  }

  void add_buffers() {
    const auto& buffers = plan_.program.buffers;
    for (size_t i = 0; i < buffers.size(); ++i) {
      Description::Buffer& buffer = made_.buffers.emplace_back();
      buffer.kind = name_of(buffers[i].kind);
      buffer.place = name_of(i < schedule_.places.size() ? schedule_.places[i] : Place::kNowhere);
      buffer.bytes = buffers[i].nbytes;
      buffer.offset = i < schedule_.offsets.size() ? schedule_.offsets[i] : 0;
      buffer.group = buffers[i].group;
      buffer.output = plan_.outputs[i];
    }
  }

  void add_nodes() {
    for (const graph::Node& node : plan_.program.nodes) {
      Description::Node& made = made_.nodes.emplace_back();
      made.op = node.op->name;
      made.text = graph::print(plan_.program, node);
      made.source = node.source;
      for (const graph::Use& use : graph::uses(plan_.program, node)) {
        if (use.reads) add_once(use.buffer, &made.reads);
        if (use.writes) add_once(use.buffer, &made.writes);
        if (plan_.program.buffers[use.buffer].kind == graph::BufferKind::kFresh) continue;
        uint64_t& bytes = made_.buffers[use.buffer].bytes;
        bytes = std::max(bytes, static_cast<uint64_t>(std::max(int64_t{0}, use.end_byte)));
      }
    }
  }

  void add_steps() {
    for (const Step& step : schedule_.steps) {
      const auto index = static_cast<uint32_t>(made_.steps.size());
      Description::Step& made = made_.steps.emplace_back();
      made.nodes = step.nodes;
      made.launches = static_cast<uint32_t>(step.launches.size());
      if (step.kernel != kNoKernel) made.kernel = step.kernel;
      if (index < schedule_.seconds.size()) made.seconds = schedule_.seconds[index];
      for (const uint32_t node : step.nodes) made_.nodes[node].step = index;
    }
  }

  void add_lifetimes() {
    std::vector<bool> seen(made_.buffers.size());
    for (uint32_t i = 0; i < schedule_.steps.size(); ++i) {
      for (const graph::Use& use : uses(plan_, schedule_.steps[i])) {
        Description::Buffer& buffer = made_.buffers[use.buffer];
        if (!seen[use.buffer]) buffer.first = i;
        buffer.last = i;
        seen[use.buffer] = true;
      }
    }
  }

  // The arena is there from the first step to the last; a block from the step that makes it to its
  // last use, or to the end where the program keeps it.
  void add_held_bytes() {
    const size_t steps = made_.steps.size();
    std::vector<int64_t> change(steps + 1, 0);
    for (size_t i = 0; i < made_.buffers.size(); ++i) {
      const Description::Buffer& buffer = made_.buffers[i];
      const bool block = i < schedule_.places.size() && (schedule_.places[i] == Place::kAllocated ||
                                                         schedule_.places[i] == Place::kAdopted);
      if (!block) continue;
      const auto bytes = static_cast<int64_t>(buffer.bytes);
      change[buffer.first] += bytes;
      if (!buffer.output) change[buffer.last + 1] -= bytes;
    }
    for (size_t i = 0; i < steps; ++i) {
      for (const Reuse& reuse : schedule_.steps[i].reuse) {
        const auto bytes = static_cast<int64_t>(made_.buffers[reuse.of].bytes);
        change[i] -= bytes;
        change[i + 1] += bytes;
      }
    }
    auto held = static_cast<int64_t>(schedule_.arena_bytes);
    for (size_t i = 0; i < steps; ++i) {
      held += change[i];
      made_.steps[i].held_bytes = static_cast<uint64_t>(held);
      made_.peak_bytes = std::max(made_.peak_bytes, made_.steps[i].held_bytes);
    }
  }

  const Plan& plan_;
  const Schedule& schedule_;
  Description made_;
};

}  // namespace

Description describe(const Plan& plan, const Schedule& schedule) {
  return Describer(plan, schedule).run();
}

}  // namespace acc::plan
