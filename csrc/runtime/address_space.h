#pragma once

#include <cstddef>

// Addresses for storages whose memory does not exist yet: unique, not null, inside one range of
// virtual memory that nobody may read. Code that compares pointers is right, code that follows one
// faults at once. Thread safe, without a lock.
namespace acc::runtime {

// A fresh address for `nbytes` bytes; null for none, as on CUDA. An address comes back only after
// the whole range was handed out once. Throws in a process that may not use the device (fork.h).
void* reserve(size_t nbytes);

// Whether `address` lies in the range: it is the address of a storage without memory.
bool reserved(const void* address) noexcept;

}  // namespace acc::runtime
