#pragma once

namespace acc::distributed {

// Starts the threads beside the program that look after its groups; a second call does nothing.
//
// A process that has recorded something that others wait for, and then nothing for a while, submits
// it: it may be asleep, or waiting itself for those others. And what the ranks of a group do is
// compared (ledger.h).
void watch_groups();

}  // namespace acc::distributed
