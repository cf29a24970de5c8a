#pragma once

#include <vector>

#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"

// What a flush asks of a trace and of a plan to bring the two together.
namespace acc::session {

// Per buffer of the trace, whether the user can reach what it makes.
std::vector<bool> alive_buffers(const record::Trace& trace);

// Whether a plan that keeps `outputs` keeps all that is alive.
bool covers(const std::vector<bool>& outputs, const std::vector<bool>& alive);

// The same of a trace's plan, without a list of what is alive.
bool keeps_alive(const plan::Plan& plan, const record::Trace& trace);

// Whether the buffers that overlap do so as the plan knows it. Everything else was compared while
// the trace followed the plan.
bool overlaps_as_planned(const plan::Plan& plan, const record::Trace& trace);

// Plans are made without generated kernels from now on. False: they were already.
bool stop_fusing();

// ACC_DUMP: what a new plan was made of, or what is left of it.
void dump(const plan::Plan& plan);

// ACC_DUMP=passes: the graph as recorded, and after each pass.
plan::Observer pass_observer();

}  // namespace acc::session
