#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

// Running out of memory: telling it from other failures, and causing it in tests.
namespace acc::runtime {

// Whether a caught exception says that memory could not be had. PyTorch's CPU allocator throws no
// type of its own for that.
bool is_out_of_memory(const std::exception_ptr& error);

// For tests: from now on `after` allocations of the host executor succeed and the next `times` fail
// as the real ones do; `times` = 0 ends it. Those of less than `at_least` bytes succeed and do not
// count. `lost`: they fail as those of a GPU that is gone. Thread safe.
void fail_allocations(int64_t after, int64_t times, size_t at_least, bool lost = false);

// Called before each allocation of the host executor: of a plan's memory and by its operators.
void about_to_allocate(size_t nbytes);

// Allocations since the last call of `fail_allocations`.
int64_t allocations_counted();

}  // namespace acc::runtime
