#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "csrc/runtime/backend.h"

// Events of a device whose work is recorded before it is submitted. All recorded work of a device
// runs in program order on its default stream, whatever stream was current; other streams hold what
// was submitted to them directly (copies of the loader, collectives, custom kernels).
//
// So an event has up to two markers: one in the default stream, set when the work recorded before
// the event was submitted, and one in the event's own stream, set at once.
namespace acc::runtime {

class Event {
 public:
  explicit Event(bool timing) : timing_(timing) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Marks the end of what was recorded and submitted until now. May be called again.
  void record(c10::Stream stream);
  // What `stream` is given from now on waits for the event. Submits nothing: recorded work is in
  // order anyway, and the rest waits as soon as the marker is set.
  void block(c10::Stream stream);
  // These submit what was recorded before the event.
  bool query();
  void synchronize();
  // Milliseconds from this event to `later`. Both were recorded with timing.
  double elapsed_ms(Event& later);

 private:
  friend void events_submitted(c10::DeviceIndex device);
  void settle();
  // The caller of these holds the mutex of the device's list.
  void set_marker();
  void block_stream(c10::Stream stream);

  const bool timing_;
  c10::DeviceIndex device_ = -1;
  bool waiting_ = false;              // in the device's list: the first marker is not set yet
  std::unique_ptr<Marker> recorded_;  // in the default stream
  std::unique_ptr<Marker> direct_;    // in the event's own stream, if that is another one
  std::vector<c10::Stream> blocked_;  // to wait for `recorded_` once it is set
};

// The session calls this when a flush of `device` has submitted (on the host: done) its work,
// failed ones too, before anything more can be recorded: with the trace mutex held. Sets the
// markers of the events that were waiting for it.
void events_submitted(c10::DeviceIndex device);

// The program may submit work of its own to `stream` that uses `memory`, whose address it was told,
// as long as `storage` lives. The allocator then keeps memory that is freed from others until the
// stream has passed; captured work, which keeps its results itself, waits as below. Call it while
// nothing is captured: the allocator forgets what it hears then. The default stream needs no word.
void let_use(c10::Stream stream, const c10::Storage& memory, const c10::Storage& storage);

// Call it before work is submitted: makes the default stream wait for what such streams hold by
// now. Once their storages are gone it waits a last time, and they are forgotten: from then on the
// program may destroy them. While the program captures a graph of its own there, it waits for none.
void follow_own_streams(c10::DeviceIndex device);

}  // namespace acc::runtime
