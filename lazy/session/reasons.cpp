#include "lazy/session/reasons.h"

#include <array>
#include <string>
#include <string_view>

#include "csrc/runtime/backend.h"
#include "lazy/record/recorder.h"
#include "lazy/record/source.h"
#include "lazy/record/watch.h"

namespace acc::session {

using base::Counter;
using record::FlushReason;

Counter counter_of(FlushReason reason) {
  constexpr std::array kCounters{
      Counter::FlushExplicit, Counter::FlushRead,     Counter::FlushStep,
      Counter::FlushLoader,   Counter::FlushFallback, Counter::FlushDataDependent,
      Counter::FlushCap,      Counter::FlushEvent,    Counter::FlushResize,
      Counter::FlushPointer,  Counter::FlushEager,    Counter::FlushExit,
      Counter::FlushExchange, Counter::FlushIdle};
  return kCounters[static_cast<size_t>(reason)];
}

const char* cut_text(FlushReason reason) {
  switch (reason) {
    case FlushReason::kRead:
      return "a value is read";
    case FlushReason::kFallback:
      return "an operator that cannot be recorded runs at once";
    case FlushReason::kDataDependent:
      return "an operator runs at once, since the shape of its result depends on data";
    case FlushReason::kCap:
      return "as much is pending as may be";
    case FlushReason::kEvent:
      return "an event or a stream is asked";
    case FlushReason::kResize:
      return "memory is resized";
    case FlushReason::kPointer:
      return "an address is asked for";
    default:
      return "";
  }
}

bool is_cut(FlushReason reason) { return *cut_text(reason) != '\0'; }

std::vector<c10::DeviceIndex> with_pending(c10::DeviceIndex device) {
  std::vector<c10::DeviceIndex> found;
  for (int i = 0; i < runtime::backend().device_count(); ++i) {
    const auto index = static_cast<c10::DeviceIndex>(i);
    if (device >= 0 && device != index) continue;
    if (record::recorder(index).pending() > 0) found.push_back(index);
  }
  return found;
}

// Returns the place in the program where this is called.
static uint32_t count_here(std::string_view what) {
  const uint32_t source = record::source_here();
  const std::string place = record::short_source_text(source);
  base::count_keyed(what, place.empty() ? "elsewhere" : place);
  return source;
}

uint32_t count_place(c10::DeviceIndex device, FlushReason reason) {
  if (reason == FlushReason::kStep || reason == FlushReason::kLoader ||
      reason == FlushReason::kEager || reason == FlushReason::kExit ||
      reason == FlushReason::kIdle) {
    return 0;
  }
  if (with_pending(device).empty()) return 0;
  return count_here(base::name(counter_of(reason)));
}

void count_wait() { count_here("waits"); }

void note_cuts(c10::DeviceIndex device, FlushReason reason) {
  for (const c10::DeviceIndex index : with_pending(device)) record::note_cut(reason, index);
}

}  // namespace acc::session
