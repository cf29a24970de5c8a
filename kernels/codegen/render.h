#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/codegen/kernel_spec.h"

// Kernels as text for a compiler, without any header.
namespace acc::codegen {

struct KernelText {
  std::string name;  // of the function; a hash of all that decides what it does
  std::string text;  // the function
};

// A function of type HostFunction in C++ with the compiler's vector types.
KernelText render_host(const KernelSpec& kernel);

// A function in CUDA C++ of a table in the GPU's memory, a count of calls, and a stage: one launch
// for all calls, as the kernels of an optimizer have. The table is words of 64 bits: the first
// block of each call, and how many blocks there are; then what each call passes (kernel_spec.h).
// `cuda_launch` says how many blocks a call gets, their threads, which are the same for all, and
// how much memory a block has use for.
// Stage kAtOnce is all of the kernel; `in_parts`: it can go by stages, too (cuda_launch.h).
KernelText render_cuda(const KernelSpec& kernel, bool in_parts = false);

// What has to stand before the functions, in one file: types, conversions, mathematics. It is the
// same for all, so that a kernel is the same thing in whichever file it is compiled.
const std::string& host_preamble();
const std::string& cuda_preamble();

// What NVRTC has to be told: products and sums are rounded one by one unless the text says fma.
inline constexpr std::string_view kCudaOptions[] = {"--fmad=false", "--std=c++17"};

}  // namespace acc::codegen
