#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// What is under way between this process and others. A plan begins a transfer in one step and waits
// for it in another, so both know it by a number, its ticket, which is unique in the plan.
namespace acc::runtime {

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns when what comes later on this device may use the transfer's memory. Throws when the
  // transfer failed, or this process was interrupted.
  virtual void wait() = 0;
  // Whether that may be now, without waiting for other processes.
  virtual bool over() = 0;
};

// While this lives the calling thread runs a plan of the device, or a part of it: one thread at a
// time does. The transfers that it begins and waits for are the device's.
class TransfersOf {
 public:
  explicit TransfersOf(c10::DeviceIndex device);
  ~TransfersOf();
  TransfersOf(const TransfersOf&) = delete;
  TransfersOf& operator=(const TransfersOf&) = delete;

 private:
  void* const before_;
};

void begin_transfer(int64_t ticket, std::unique_ptr<Transfer> transfer);
// Nothing where it has been waited for already.
void end_transfer(int64_t ticket);

// Waits for all that is under way. Throws when a transfer failed; all are over then.
void join_transfers();
bool transfers_under_way();

// Work that is captured joins what it forks, and nothing that was begun outside of it: the events
// of a GPU that transfers are waited for by mean nothing on the other side of a capture. So a piece
// of it begins with `fork_transfers`, waits for nothing that was begun before, and at its end what
// it has begun since is waited for. Returns how many there were; throws as `join_transfers`.
void fork_transfers();
size_t join_forked_transfers();
// What the piece has begun was taken back: it was captured, and the capture came to nothing.
void forget_forked_transfers() noexcept;

// A transfer of this thread's plan was given up: others may go on to write to its memory.
void leave_transfers() noexcept;

// A plan has failed: forgets what it has begun, without waiting for other processes. False: some is
// still under way, and its memory must never be used for something else.
bool end_all_transfers() noexcept;

// What a plan that failed means to a group of processes that it has exchanges with.
struct Undone {
  int64_t group;
  uint64_t exchanges = 0;  // that it has not begun, and will not
  bool broken = false;     // one failed as it began: nobody knows what of it the others get
};

// A plan that others take part in has failed, and why.
using FailureListener = void (*)(const std::string& why, const std::vector<Undone>& undone);
void install_failure_listener(FailureListener listener);
void tell_failure(const std::string& why, const std::vector<Undone>& undone) noexcept;

}  // namespace acc::runtime
