#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lazy/graph/graph.h"
#include "lazy/record/flush.h"
#include "lazy/session/explain.h"

// Strict mode: once a thread has warmed up, its training steps are submitted whole, and are plans
// that were there. Anything else is an error that names the line.
//
// A step trains when an operator of it that multiplies was recorded with gradients on; where none
// multiplies, when gradients are on where it is submitted. So evaluation is left alone.
namespace acc::session {

struct Strict {
  bool on = false;
  int64_t warm_up = 0;   // steps that may still do as they like
  bool trains = false;   // the step does, part of which was submitted already
  bool excused = false;  // the step may do as it likes, and is none of the warm-up
};

// Of the calling thread; ACC_STRICT says how it begins.
Strict strict();
void set_strict(const Strict& strict);

// The calling thread's step excuses itself, until its end or `on` is false: it has to read before
// it can be like later ones.
void excuse_step(bool on);

// Throws where submitting what is pending on `device` would cut a step that may not be cut; nothing
// has happened then. `op`: the operator that asks for it, if one does.
void refuse_cut(c10::DeviceIndex device, record::FlushReason reason, std::string_view op = {});

// The same where the program waits for all of `device`: what ends a step without waiting may do so.
void refuse_wait(c10::DeviceIndex device);

// Work that the calling thread has submitted.
struct Submitted {
  std::shared_ptr<plan::Plan> plan;
  record::FlushReason reason = record::FlushReason::kExplicit;
  bool first = false;           // the plan is new
  std::optional<NewPlan> news;  // the plan is, or has more results
};

// To be called when the recorder's mutex is free: where the program is, the interpreter has to be
// asked. Remembers the news. Returns what is wrong with the plan where a step has ended; "" where
// nothing is.
std::string tell(Submitted made);

}  // namespace acc::session
