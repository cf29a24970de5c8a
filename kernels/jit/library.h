#pragma once

#include <string>
#include <string_view>

// Shared libraries from descriptors and from memory. What is loaded is never unloaded: the kernels
// of a plan have no other owner.
namespace acc::jit {

// Whether these are all the bytes of an ELF file. A library that was cut off would be mapped, and
// the process killed where it touches what is missing.
bool is_whole_library(std::string_view bytes);
// The same of what NVRTC makes for a GPU.
bool is_whole_cubin(std::string_view bytes);

// Loads the library behind a descriptor, which may be closed then. Null when it cannot be loaded,
// and `problem` says why. The same file gives the same handle.
void* load_library(int fd, std::string& problem);
// Loads a library that is in no file.
void* load_library(std::string_view bytes, std::string& problem);

// The function of that name, null if there is none.
void* find_function(void* library, const std::string& name);

}  // namespace acc::jit
