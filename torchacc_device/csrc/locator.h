#pragma once

#include <cstdint>

namespace acc::bindings {

// The innermost Python frame outside of torch and of this package, as a number of
// `record::intern_source`; in the backward pass, the autograd node that runs. Takes the interpreter
// lock, so it is called only for operators that are recorded anew, never while a plan is followed.
uint32_t locate();

}  // namespace acc::bindings
