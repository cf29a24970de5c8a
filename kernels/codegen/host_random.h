#pragma once

#include <string>

// Random numbers in generated host kernels, as text that stands behind the rest of the preamble.
// The bits are those of the CPU kernels in kernels/library (docs/random.md).
namespace acc::codegen {

std::string host_random();

}  // namespace acc::codegen
