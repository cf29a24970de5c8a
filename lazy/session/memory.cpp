#include <exception>
#include <functional>
#include <string>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/on_device.h"
#include "lazy/exec/runner.h"
#include "lazy/record/recorder.h"
#include "lazy/session/failure.h"
#include "lazy/session/session.h"
#include "lazy/session/session_impl.h"

// Memory that is asked for outside of plans, whose runs give back what there is by themselves.
namespace acc::session {

using record::Recorder;

void Session::release_cached(c10::DeviceIndex device) {
  if (record::recorder(device).suspended()) return;
  exec::release_captures(device);
  exec::release_arena(device);
  count_captures(devices_[static_cast<size_t>(device)]);
}

uint64_t Session::give_back(c10::DeviceIndex device) {
  if (record::recorder(device).suspended()) {  // it gave back what it could before it stopped
    runtime::backend().empty_cache();
    return 0;
  }
  exec::release_arena(device);
  const uint64_t given_back = exec::give_back(device);
  count_captures(devices_[static_cast<size_t>(device)]);
  return given_back;
}

namespace {

// What `call` threw for want of memory; null if it did not.
std::exception_ptr no_memory(const std::function<void()>& call) {
  try {
    call();
    return nullptr;
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!runtime::is_out_of_memory(error)) throw;
    return error;
  }
}

void find_memory(c10::DeviceIndex device, const std::string& what, bool may_repeat,
                 const std::function<uint64_t()>& give_back, const std::function<void()>& call) {
  std::exception_ptr error = no_memory(call);
  if (error == nullptr) return;
  const uint64_t given_back = give_back();
  if (may_repeat) error = no_memory(call);
  if (error == nullptr) return;
  rethrow_as(error, /*no_memory=*/true,
             base::concat(what, ": ", runtime::text_of(error), memory_held(device, given_back),
                          may_repeat ? ""
                                     : " It may have done a part of its work, so it was not tried "
                                       "again.",
                          " Free tensors (del), or use a smaller size or batch."));
}

}  // namespace

c10::Storage allocate(size_t nbytes, c10::Stream stream) {
  const c10::DeviceIndex device = stream.device_index();
  const runtime::OnDevice on_device(stream);
  c10::Storage memory;
  find_memory(
      device, base::concat("[acc] tried to allocate ", nbytes, " bytes"), /*may_repeat=*/true,
      [device] { return Session::get().give_back(device); },
      [&] { memory = exec::allocate(nbytes); });
  return memory;
}

void with_memory(c10::DeviceIndex device, const std::string& what, bool may_repeat,
                 const std::function<void()>& call) {
  if (Recorder::runs_here()) return call();  // for a plan, whose run gives back
  find_memory(
      device, what, may_repeat,
      [device] {
        const auto lock = record::recorder(device).lock();
        return Session::get().give_back(device);
      },
      call);
}

}  // namespace acc::session
