#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lazy/plan/cache.h"
#include "lazy/plan/difference.h"
#include "lazy/plan/plan.h"
#include "lazy/record/flush.h"

// Why there was a new plan. Asked only when one is made.
namespace acc::session {

enum class Why : uint8_t {
  kFirst,    // none was kept
  kOther,    // no plan that is kept begins alike
  kChanged,  // it differs from the one that it is most like
  kRest,     // the step was cut before, by a plan that was new itself
  kKept,     // the program keeps a result that it did not keep before
};
const char* name(Why why);

struct NewPlan {
  Why why = Why::kFirst;
  c10::DeviceIndex device = 0;
  size_t operators = 0;
  // From the plan that is most like it; of a result that is kept: the operator that makes it.
  plan::Difference difference;
  record::FlushReason reason = record::FlushReason::kExplicit;  // why it was submitted, and
  uint32_t submitted_at = 0;                                    // where
};

// One line for people, without the place.
std::string text_of(const NewPlan& made);
// Where in the program it has become a new one, for `source_text`.
uint32_t place_of(const NewPlan& made);

using Plans = plan::LruCache<std::shared_ptr<plan::Plan>>;

// What the recorded step is compared with is the plan that begins with the most of its operators;
// of several, the one that was expected, or else the one that was used last. So it is where none
// begins alike.
NewPlan explain(const graph::Graph& now, const Plans& plans, const plan::Plan* expected);

// A plan that is made again, to keep what is `alive` too.
NewPlan explain_kept(const plan::Plan& plan, const std::vector<bool>& alive);

// Remembers the latest, some hundreds at most.
void note(NewPlan made);

struct News {
  std::vector<NewPlan> plans;  // the oldest first
  uint64_t forgotten = 0;      // before those
};
// What was noted since the last call.
News take_news();

}  // namespace acc::session
