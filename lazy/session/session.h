#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lazy/exec/missed_kernel.h"
#include "lazy/plan/describe.h"
#include "lazy/record/flush.h"
#include "lazy/record/storage.h"

// Where recorded work becomes done work: the only place that sees recorder, plans and executor.
namespace acc::session {

// Installs the session behind the hooks of csrc/runtime/hooks_table.h. Idempotent.
void start();

// Submits what is pending on `device` (all devices if negative). On the host executor it is done
// when this returns. Throws what a failing operator threw, with its name and the line that recorded
// it; whatever then has no valid contents is poisoned and says so when it is used.
//
// Where memory ran out and the failed step has changed nothing, the work stays pending: c10's
// OutOfMemoryError is thrown, and the next flush goes on at that step.
//
// With `may_begin` it ends before the first exchange with other processes, by the number of their
// group, of which that is not true; the next flush goes on there. (Captured work stops for nobody.)
using MayBegin = std::function<bool(int64_t group)>;
void flush(c10::DeviceIndex device, record::FlushReason reason,
           const MayBegin& may_begin = nullptr);

// How much is pending on a device, if other processes wait for something of it; else 0. A hint: it
// takes no lock.
size_t others_wait_for(c10::DeviceIndex device);
// Whether its work has stopped before something that waits for other processes, or for memory.
bool is_stopped(c10::DeviceIndex device);
// Whether some thread runs a plan of the device now. A hint, too.
bool runs(c10::DeviceIndex device);

// Ends the state in which work waits for memory, before something is recorded: goes on with it, and
// gives it up where there still is none, which poisons what it was to write. Does not throw for
// that if the user was told before; else it goes on waiting. Other failures of that work are
// thrown. False: the process ends, and nothing goes on.
bool settle(c10::DeviceIndex device);

// The poison of a tensor that is about to be written as a whole, which is taken off; null when
// there is none or the tensor is only a part of its storage.
std::shared_ptr<const record::Poison> cure(const at::Tensor& tensor);
void poison_again(const at::Tensor& tensor, std::shared_ptr<const record::Poison> poison);

// Why an acc tensor has no valid contents; null where it has some, or may get them by what is
// pending. The caller does not hold the interpreter lock.
std::shared_ptr<const record::Poison> poison_of(const at::Tensor& tensor);

// The tensor of the backend's device that shares the memory of `tensor`, an acc tensor; pending
// work is submitted first and memory that was never written is allocated.
at::Tensor alias(const at::Tensor& tensor, record::FlushReason reason);

// The same for who waits for the contents: counts where, if they were submitted before.
at::Tensor await(const at::Tensor& tensor);

// For a tensor that nothing was recorded on and that has no contents: its memory, made on `stream`,
// which it belongs to, for use by the device's work. Nothing for others.
std::optional<at::Tensor> new_memory(const at::Tensor& tensor, c10::Stream stream);

// The same as `alias` for a library that keeps it: from now on operators on this storage run at
// once, so that both sides see each other's writes.
at::Tensor share(const at::Tensor& tensor);

// Memory of a device, made on `stream`, for who has the lock of its recorder. Where there is none,
// captured work and caches give back what they have; OutOfMemoryError, if that is in vain, says how
// much it was.
c10::Storage allocate(size_t nbytes, c10::Stream stream);

// The same for what allocates by itself, and is called without the lock: `call` is called once more
// if it `may_repeat`, that is, may be called as if it never had been. The error begins with `what`.
void with_memory(c10::DeviceIndex device, const std::string& what, bool may_repeat,
                 const std::function<void()>& call);

// Makes the storage's memory, which has no pending writes, available: allocates it if there is
// none. The caller has the lock.
void materialise(record::LazyStorage& storage);

// Resizes a storage in program order: what was recorded keeps the old contents.
void resize_storage(record::LazyStorage& storage, size_t nbytes);

// A plan as it ran, for people.
struct LastPlan {
  plan::Description description;
  struct Kernel {
    std::string name;       // of its function
    std::string cuda_text;  // what it is for a GPU, behind `cuda_preamble`
  };
  std::vector<Kernel> kernels;
  std::string cuda_preamble;
  std::vector<std::string> cuda_options;  // of NVRTC, beside the architecture
  const char* ended_by = "";              // why the work was submitted: the name of a flush counter
  // Operators of the plans that ran in turn the last time round, this one first: a loop of one
  // plan has one entry.
  std::vector<size_t> loop;
};

// The plan that ran last on `device`; nothing when none has. With `largest`, the one with the most
// operators of those that ran since timing was switched on.
std::optional<LastPlan> describe_plan(c10::DeviceIndex device, bool largest);

// Switches timing on or off: while it is on, runs take the time of each of their steps.
void time_plans(bool on);

// Whether kernels of plans are those of a GPU, be it an emulated one.
bool for_gpus();

// Switches captures of plans of all devices on or off; nullopt: as they begin (ACC_HOST_GRAPHS).
void capture_plans(std::optional<bool> on);

// About how much of the host's memory captured work of a device takes.
uint64_t captures_bytes(c10::DeviceIndex device);

// For tests: the host captures as a GPU does, and some of it refuses (lazy/exec/refusals.h).
void refuse_captures(const std::string& names);

// Leaves out the passes in `names` (see ACC_SKIP_PASSES) from now on, in plans of all devices.
void skip_passes(const std::string& names);

// Several processes train together from now on: nothing that changes bits is decided by time any
// more. Plans that may have been are dropped, without submitting what is pending.
void run_alike();

// Plans have no generated kernels from now on: another process that trains with this one has none,
// and what both compute is to have the same bits. What is pending is not submitted.
void run_unfused();

// Why this process has no generated kernels; "" where it makes some. May start the compiler.
std::string kernels_problem();

// The generated kernels that this process has done without, but for the first `from`, and whether
// it has used the one of that name whenever it needed it. None where it makes none.
std::vector<exec::MissedKernel> missed_kernels(size_t from);
bool relies_on_kernel(const std::string& name);

// Drops all plans and the arena of a device. Frees memory, forgets nothing that matters.
void release_memory(c10::DeviceIndex device);

// Runs once when the interpreter ends: work in flight is finished or given up. From then on
// operators are to run at once, and flushes do nothing. Returns what has failed; "" mostly.
std::string stop();
bool has_ended();

}  // namespace acc::session
