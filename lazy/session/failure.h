#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "csrc/runtime/transfers.h"
#include "lazy/graph/graph.h"
#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"

// What becomes of a step that failed: what its user is told, and the tensors that have no contents.
namespace acc::session {

// Throws `message` with the type that the operator threw, so that user code catches what it would
// catch in eager mode; what Python raised as it is, with the message as a note.
[[noreturn]] void rethrow_as(const std::exception_ptr& error, bool no_memory,
                             const std::string& message);

// What the user has to know when memory ran out: what tensors hold, and how much captured work gave
// back in vain. Of a plan, how much the step takes, too.
std::string memory_held(c10::DeviceIndex device, uint64_t given_back);
std::string memory_situation(const plan::Plan& plan, const plan::Schedule& schedule,
                             c10::DeviceIndex device, uint64_t given_back);

// Poisons what the steps from `step` on were to write: in place, or as a result.
void poison_rest(const plan::Plan& plan, const plan::Schedule& schedule, const record::Trace& trace,
                 size_t step, const std::shared_ptr<const record::Poison>& poison);

// Nothing of the trace was done: what it was to make or to write has no contents, and processes
// that take part in it hear of `undone`.
void poison_all(const record::Trace& trace, const std::exception_ptr& error,
                const std::vector<runtime::Undone>& undone);

// What is left undone with other processes where nothing of a graph runs, and where the steps
// behind `failed` do not; nor itself, if what failed was under way before it.
std::vector<runtime::Undone> undone_of(const graph::Graph& graph);
std::vector<runtime::Undone> undone_of(const plan::Plan& plan, const plan::Schedule& schedule,
                                       size_t failed, bool before);

}  // namespace acc::session
