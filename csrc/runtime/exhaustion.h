#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

// Running out of memory: telling it from other failures, and causing it in tests.
namespace acc::runtime {

// Whether a caught exception says that memory could not be had. PyTorch's CPU allocator and
// NVIDIA's libraries have no type of their own for that, and CUDA's calls beside PyTorch's
// allocator (what a graph needs to be made or launched, pinned memory) have that of all their
// errors.
bool is_out_of_memory(const std::exception_ptr& error);

// What an injected failure looks like.
enum class Failure : uint8_t {
  kNoMemory,  // the real one of PyTorch's CPU allocator
  kCuda,      // CUDA's, where the allocator is not PyTorch's
  kCublas,    // cuBLAS's
  kLost,      // of a GPU that is gone
};

// For tests: from now on `after` allocations of the host executor succeed and the next `times`
// fail; `times` = 0 ends it. Those of less than `at_least` bytes succeed and do not count. Thread
// safe.
void fail_allocations(int64_t after, int64_t times, size_t at_least,
                      Failure as = Failure::kNoMemory);

// For tests: the host executor's next captures, and submissions of captured work, fail before they
// have begun, as CUDA's do for want of memory.
void fail_captured_work(int64_t captures, int64_t submissions);
void about_to_capture();
void about_to_submit();

// Called before each allocation of the host executor: of a plan's memory and by its operators.
void about_to_allocate(size_t nbytes);

// Allocations since the last call of `fail_allocations`.
int64_t allocations_counted();

}  // namespace acc::runtime
