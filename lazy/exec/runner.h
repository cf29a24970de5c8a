#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lazy/plan/plan.h"

// Runs a plan, step by step, on the backend's device.
namespace acc::exec {

// Memory of the backend's current device.
c10::Storage allocate(uint64_t bytes);

// The memory of a buffer that is given to a plan.
struct Given {
  c10::Storage memory;
  int64_t byte_offset = 0;
};

// The memory of a buffer that a plan keeps for the user.
struct Output {
  uint32_t buffer;
  c10::Storage memory;
};

// Where the program recorded the nodes, for profilers and for who asks why steps are not captured.
struct Places {
  // Per node as it was recorded: the place in this very step; 0, or nothing, where it is not known.
  // Then the node has the place where its plan was recorded.
  std::vector<uint32_t> of_recorded;
  std::string (*text)(uint32_t place) = nullptr;  // for people
};

// A run that stopped before its next step had changed anything: for want of memory, or since others
// have not come to an exchange with them.
class Stopped;

// How a run ended. `failed_step` is the number of steps when all went well; steps before it are
// complete, those after it did not run, and what the failed one did is unknown unless `stopped` is
// set: then there are no outputs yet, and `resume` goes on at that very step. Without an error it
// stopped for others.
struct Outcome {
  const plan::Schedule* schedule = nullptr;  // of the plan: the steps that were run
  std::vector<Output> outputs;               // by their buffers
  std::vector<Given> room;                   // `given`, empty, for the next run to fill
  // The number of the capture that the run was or became: `outputs` are in memory that work which
  // was captured before may write over. 0: they are the receiver's alone.
  uint64_t capture = 0;
  std::weak_ptr<const uint64_t> keeper;  // while it lives the capture has the outputs too
  size_t failed_step = 0;
  bool failed_before = false;  // that step, of something that was under way
  std::exception_ptr error;
  std::shared_ptr<Stopped> stopped;
  uint64_t given_back = 0;  // bytes of captured work, for want of memory
  bool recaptured = false;  // what is captured has become more or less
};

// Called when captured work is about to be submitted: what captures from `number` on have made, and
// somebody still has, is moved elsewhere, inputs of this run included.
enum class Way : uint8_t {
  kFree,
  kTaken,     // by a result that cannot be moved: its address is known to somebody
  kNoMemory,  // for a copy of a result
};
using MakeWay = std::function<Way(uint64_t number, std::vector<Given>& given)>;

// Asked before an exchange with a group of other processes: false stops the run. Empty: none does.
using MayBegin = std::function<bool(int64_t group)>;

// `given`: per buffer, empty for those the plan makes; taken apart while the run goes on, so that
// the last reference to an input dies after its last use. One run at a time per device, one that
// has stopped included. `plan` outlives a run that stops.
//
// A step that finds no memory is tried once more after the backend's caches were emptied. Captured
// work stops for nobody.
Outcome run(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
            std::span<const int64_t> values, Places places, const MakeWay& make_way,
            const MayBegin& may_begin);

// Goes on with a run; complete steps are not repeated. `values` as before. `needed`: per node of
// the plan's program, whether anybody still wants what it makes.
Outcome resume(Stopped& stopped, std::span<const int64_t> values, std::vector<bool> needed,
               const MayBegin& may_begin);

// The results that are complete: no step that did not run writes them. Those that are `alive` count
// as the receiver's, and the run lets go of what no step is going to read.
std::vector<Output> hand_over_complete(Stopped& stopped, const std::vector<bool>& alive);

// The first step that did not run, and the steps that it is one of.
size_t next_step(const Stopped& stopped);
const plan::Schedule& schedule(const Stopped& stopped);

// Gives a run up: as if its next step had failed for good with `error`.
Outcome give_up(Stopped& stopped, std::exception_ptr error);

// Switches timing on or off, for runs that begin later. A timed run waits for the device after each
// step, and notes the time of its steps in their schedule.
void time_steps(bool on);
bool times_steps();

// Switches captures on or off, for runs that begin later; nullopt: as at first, on where the device
// is a GPU, or with ACC_HOST_GRAPHS.
void capture_plans(std::optional<bool> on);

// About how much of the host's memory the captures of a plan take.
uint64_t captures_bytes(const plan::Plan& plan);
uint64_t captures_bytes(c10::DeviceIndex device);  // of all plans

// Drops what has been captured on a device, and so the memory that it has.
void release_captures(c10::DeviceIndex device);

// For want of memory: the same, all of it, since captures share a pool, which has its memory until
// the last of them is gone. Frees what allocators keep, too. Returns the bytes of captured work.
uint64_t give_back(c10::DeviceIndex device);

// Frees the arena of a device. Nothing may be running on it.
void release_arena(c10::DeviceIndex device);

}  // namespace acc::exec
