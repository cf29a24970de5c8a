#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "lazy/exec/runner.h"
#include "lazy/plan/cache.h"
#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"
#include "lazy/session/captured_results.h"
#include "lazy/session/explain.h"
#include "lazy/session/replay.h"
#include "lazy/session/session.h"
#include "lazy/session/strict.h"

// What a session knows of each device: plans, work that waits, ends of steps under way.
namespace acc::session {

// A plan may be expected by a recorder when the cache drops it, so the cache shares ownership.
using Cached = std::shared_ptr<plan::Plan>;

class Session {
 public:
  static Session& get();

  // Returns what strict mode has against the plan of what was submitted.
  std::string flush(record::Recorder& recorder, record::FlushReason reason, uint32_t place,
                    const MayBegin& may_begin);
  void settle(record::Recorder& recorder);
  bool submit_watched(record::Recorder& recorder, const Look& look);
  Cached renewed(record::Recorder& recorder, const Cached& plan);
  void replay(record::Recorder& recorder, const Cached& plan, const Replay& replay);
  // Whether work waits for memory and the user was told.
  bool was_told(record::Recorder& recorder) const;
  // Whether work that waits for memory is going to write the storage.
  bool waits_to_write(record::Recorder& recorder, const record::LazyStorage& storage);
  std::optional<LastPlan> describe(c10::DeviceIndex device, bool largest);
  std::string last_work(record::Recorder& recorder);
  void time_plans(bool on);
  void forget_plans(c10::DeviceIndex device);
  void drop_plans(c10::DeviceIndex device);
  // Frees what no tensor uses and is kept only to be fast, unless work waits that has its
  // intermediates there. The caller has the lock, and runs nothing.
  void release_cached(c10::DeviceIndex device);
  // The same for want of memory, and what the allocator keeps. Returns the bytes of captured work.
  uint64_t give_back(c10::DeviceIndex device);

 private:
  struct Work {
    Cached plan;
    Cached runs;  // the plan, or what runs in its place this time
    record::Trace trace;
    bool first = false;  // the plan was made of this very trace
    record::FlushReason reason = record::FlushReason::kExplicit;
    uint32_t place = 0;  // in the program, where it was submitted
    bool told = false;   // the user, that it waits for memory
    std::optional<NewPlan> news;
  };
  // A plan that ran to its end.
  struct Ran {
    Cached plan;
    const plan::Schedule* schedule = nullptr;  // of the plan
    record::FlushReason reason = record::FlushReason::kExplicit;
  };
  // Work that waits for memory, or for others.
  struct Suspended {
    Work work;
    std::shared_ptr<exec::Stopped> run;
    std::exception_ptr error;  // where memory ran out
  };
  struct Device {
    // The ends of the steps that may still be running, oldest first.
    std::deque<std::unique_ptr<runtime::Marker>> in_flight;
    std::unique_ptr<Suspended> suspended;
    Cached expected;      // what the recorder compares with
    bool trains = false;  // an iteration has ended on it
    bool cut = false;     // a step was, by a new plan: what comes next is its rest
    Ran last;
    Ran largest;  // of those that ran while steps were timed
    CapturedResults results;
    std::vector<exec::Given> room;  // empty; of the last run, so that a steady state allocates none
    plan::LruCache<Cached> plans{base::env::plan_cache_bytes(), [](Cached&, uint64_t) {
                                   base::count(base::Counter::PlansEvicted);
                                 }};
  };
  // Sets the plan of the work, and whether it is a new one.
  void find_or_build(Device& device, Work& work);
  void look_again(Device& device, Work& work, const Look& look);
  Cached renew(Device& device, const Cached& plan, const std::vector<bool>& alive);
  void note_new(Device& device, Work& work, NewPlan made);
  static void count_captures(Device& device);
  // `tells`: who asked for the run hears of its errors.
  void finish(record::Recorder& recorder, Work work, exec::Outcome outcome, bool tells = true);
  void suspend(record::Recorder& recorder, Work work, exec::Outcome outcome);
  Submitted submit(record::Recorder& recorder, record::FlushReason reason, uint32_t place = 0,
                   const Look& look = nullptr, const MayBegin& may_begin = nullptr);
  void run(record::Recorder& recorder, Work work, const MayBegin& may_begin = nullptr);
  std::unique_ptr<runtime::Marker> end_step(record::Recorder& recorder);
  static void await(record::Recorder& recorder, const runtime::Marker& end);
  void resume(record::Recorder& recorder, const MayBegin& may_begin = nullptr);
  void give_up(record::Recorder& recorder);

  // Guarded by the mutex of the device's recorder.
  std::array<Device, base::env::kMaxHostDevices> devices_;
};

}  // namespace acc::session
