#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "csrc/base/stats.h"
#include "lazy/record/flush.h"

// Why work is submitted, as counters and for people.
namespace acc::session {

base::Counter counter_of(record::FlushReason reason);

// Whether submitting for this reason cuts a step, rather than ends it, and what it does then.
bool is_cut(record::FlushReason reason);
const char* cut_text(record::FlushReason reason);

// Of the device, or of all for -1: those where something has been recorded.
std::vector<c10::DeviceIndex> with_pending(c10::DeviceIndex device);

// Counts where in the program work was submitted that could have gone on being recorded, and
// returns that place. The ends of steps are many, and no surprise: 0.
uint32_t count_place(c10::DeviceIndex device, record::FlushReason reason);

// Counts where in the program the device is waited for though there is nothing to submit: for the
// results of what was submitted before.
void count_wait();

// A call that is being captured is submitted at its end; what does so earlier cuts it.
void note_cuts(c10::DeviceIndex device, record::FlushReason reason);

}  // namespace acc::session
