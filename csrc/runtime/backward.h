#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include "csrc/runtime/backend.h"

namespace acc::runtime {

// PyTorch runs the backward of every device but the CPU in a thread of its own. On the host that
// thread has nothing to wait for: changing threads twice costs more than recording a small step,
// and a thread that still frees Python objects when the interpreter ends aborts the process. Called
// by each thread before it records or has a say in this; set once per thread, so that a program may
// choose otherwise.
inline void keep_backward_in_this_thread() {
  thread_local bool told = false;
  if (told) [[likely]]
    return;
  // Its end brings back what was set before.
  if (c10::InferenceMode::is_enabled()) return;
  told = true;
  if (on_host()) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
}

}  // namespace acc::runtime
