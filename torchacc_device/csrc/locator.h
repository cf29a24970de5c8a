#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace acc::bindings {

// Folders whose code says nothing about the user's program: those of torch and of this project.
void set_library_folders(std::vector<std::string> folders);

// The innermost Python frame outside of them, as a number of
// `record::intern_source`; in the backward pass, the autograd node that runs. Takes the interpreter
// lock, so it is called only for operators that are recorded anew, never while a plan is followed.
uint32_t locate();

}  // namespace acc::bindings
