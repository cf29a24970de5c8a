#pragma once

namespace acc::distributed {

// Starts the thread beside the program that looks after its groups; a second call does nothing.
//
// A process that has recorded something that others wait for, and then nothing for a while, submits
// it: it may be asleep, or waiting itself for those others. Not so within a call that is recorded
// for capture, whose end submits it. And groups hear of steps that fail.
void watch_groups();

}  // namespace acc::distributed
