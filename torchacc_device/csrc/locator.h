#pragma once

#include <string>
#include <vector>

#include "lazy/record/recorder.h"

namespace acc::bindings {

// Folders whose code says nothing about the user's program: those of torch, of this project and of
// Python, but for what is installed in its site-packages.
void set_library_folders(std::vector<std::string> folders);

// Finds the innermost Python frame outside of them; in the backward pass the node of autograd that
// runs, and the place of the forward operator, where that was recorded anew, too, or of the Python
// that runs there. It takes the interpreter lock, so it is asked only for operators that are
// recorded anew, and views made meanwhile.
//
// A profiler that was made with `with_stack` or `with_modules` gets to know more: the module, by
// the names that lead to it. That is asked for each operator of a step that begins while the
// profiler is active.
record::Locator locator();

}  // namespace acc::bindings
