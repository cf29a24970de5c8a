#pragma once

#include <iosfwd>
#include <string>

// What of a machine decides whether a library made on another one runs here.
namespace acc::jit {

// The features of the processor, sorted; "" where the system does not tell.
std::string processor_text();
// Those that a text in the form of /proc/cpuinfo names.
std::string processor_text(std::istream& cpuinfo);
// The version of the C library; "" where it does not tell.
std::string c_library_text();

}  // namespace acc::jit
