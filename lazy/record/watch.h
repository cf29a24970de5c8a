#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lazy/record/flush.h"

// What a capture (lazy/capture) has to know of the call that it records: what made it impossible
// to replay, and which storages the call itself made. One watch at a time in the process.
namespace acc::record {

class LazyStorage;

// Work was submitted, or contents were read, in the middle of the call.
struct Cut {
  FlushReason reason;
  c10::DeviceIndex device;
  uint32_t source;  // see source.h
  std::string op;   // that ran at once, or empty
};

// What this thread notes in its lifetime is for `op`, which runs at once and outlives it.
class RunsAtOnce {
 public:
  explicit RunsAtOnce(const std::string& op);
  ~RunsAtOnce();
  RunsAtOnce(const RunsAtOnce&) = delete;
  RunsAtOnce& operator=(const RunsAtOnce&) = delete;

 private:
  const std::string* before_;
};

// The calling thread begins a call. Throws while another one is watched.
void start_watching();
void stop_watching() noexcept;

// One relaxed load: whether some thread, or this one, is in such a call.
bool watching();
bool watching_here();

// Notes a cut, with the line where this thread's program is. Takes the interpreter lock for that,
// so no lock of acc may be held.
void note_cut(FlushReason reason, c10::DeviceIndex device);
// Of the last watch, oldest first; at most a few.
std::vector<Cut> cuts();

void note_birth(const LazyStorage* storage);
// Whether a storage was made during the last watch.
bool was_born(const LazyStorage* storage);

// Where the calling thread's program is, as a number for `source_text`.
uint32_t source_here();

}  // namespace acc::record
