#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"

// What the session does for a captured step (lazy/capture), on the same way as every other step:
// errors poison, what finds no memory waits.
namespace acc::session {

// Looks at a trace that is about to run with `plan`, whose graph is the trace's, and may return
// another plan of the same graph to run it with. `alive`: per buffer, whether somebody holds what
// is made. Called under the recorder's lock; must not throw.
using Look = std::function<std::shared_ptr<plan::Plan>(const record::Trace& trace,
                                                       const std::shared_ptr<plan::Plan>& plan,
                                                       const std::vector<bool>& alive)>;

// Submits what is pending as the end of a step. Returns false when there is nothing.
bool submit_watched(c10::DeviceIndex device, const Look& look);

// A trace made by hand. Both are called under the recorder's lock, with nothing pending: `fill`
// gets a numbered trace without entries, and throws to have nothing run; `done` is called once the
// plan was submitted.
struct Replay {
  std::function<void(record::Trace&)> fill;
  std::function<void()> done;
};

// A plan as this process runs them: with kernels, if they are wished for, or without, a GPU's or
// the host's.
std::shared_ptr<plan::Plan> make_plan(graph::Graph graph, const base::Hash128& key,
                                      std::vector<bool> alive, const plan::Options& wish = {},
                                      const plan::Observer& observer = nullptr);

// The plan, or one of the same graph that takes its place from now on.
std::shared_ptr<plan::Plan> renewed(c10::DeviceIndex device,
                                    const std::shared_ptr<plan::Plan>& plan);

// Submits what is pending on `device`, then runs `plan`. Throws what a flush throws.
void replay(c10::DeviceIndex device, const std::shared_ptr<plan::Plan>& plan, const Replay& replay);

}  // namespace acc::session
