#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Named counters of the process. Every function is thread safe. Counting through the enum is one
// relaxed atomic addition; a caller that already holds a lock and counts per node may sum up
// locally and add once per flush.
namespace acc::base {

// X(EnumName, "snake_case_name")
#define ACC_COUNTERS(X)                         \
  X(Flushes, "flushes")                         \
  X(FlushExplicit, "flush_explicit")            \
  X(FlushRead, "flush_read")                    \
  X(FlushStep, "flush_step")                    \
  X(FlushLoader, "flush_loader")                \
  X(FlushFallback, "flush_fallback")            \
  X(FlushDataDependent, "flush_data_dependent") \
  X(FlushCap, "flush_cap")                      \
  X(FlushEvent, "flush_event")                  \
  X(FlushResize, "flush_resize")                \
  X(FlushPointer, "flush_pointer")              \
  X(FlushEager, "flush_eager")                  \
  X(FlushExit, "flush_exit")                    \
  X(FlushExchange, "flush_exchange")            \
  X(FlushIdle, "flush_idle")                    \
  X(Nodes, "nodes")                             \
  X(NodesFollowed, "nodes_followed")            \
  X(MemoHits, "memo_hits")                      \
  X(MemoMisses, "memo_misses")                  \
  X(TypesAsked, "types_asked")                  \
  X(PlansBuilt, "plans_built")                  \
  X(PlanHits, "plan_hits")                      \
  X(PlanFollows, "plan_follows")                \
  X(PlansWidened, "plans_widened")              \
  X(PlansEvicted, "plans_evicted")              \
  X(PlansPutAside, "plans_put_aside")           \
  X(NodesRemoved, "nodes_removed")              \
  X(Steps, "steps")                             \
  X(KernelLaunches, "kernel_launches")          \
  X(StrideCopies, "stride_copies")              \
  X(RunNow, "run_now")                          \
  X(Materialisations, "materialisations")       \
  X(StepWaits, "step_waits")                    \
  X(Replays, "replays")                         \
  X(Captures, "captures")                       \
  X(CaptureUs, "capture_us")                    \
  X(CapturesSubmitted, "captures_submitted")    \
  X(CapturedLaunches, "captured_launches")      \
  X(ResultsMoved, "results_moved")              \
  X(ArgumentWords, "argument_words")            \
  X(Transfers, "transfers")                     \
  X(TransferUs, "transfer_us")                  \
  X(TransferWaitUs, "transfer_wait_us")         \
  X(Errors, "errors")                           \
  X(RunsUnfused, "runs_unfused")                \
  X(PlanUs, "plan_us")                          \
  X(RunUs, "run_us")

enum class Counter : uint32_t {
#define ACC_COUNTER_ENUM(id, text) id,
  ACC_COUNTERS(ACC_COUNTER_ENUM)
#undef ACC_COUNTER_ENUM
};

#define ACC_COUNTER_ONE(id, text) +1
inline constexpr size_t kCounters = 0 ACC_COUNTERS(ACC_COUNTER_ONE);
#undef ACC_COUNTER_ONE

namespace detail {

// One cache line each: the recording threads and the executor count at the same time.
struct alignas(64) CounterCell {
  std::atomic<uint64_t> value{0};
};
extern CounterCell counter_cells[kCounters];

}  // namespace detail

inline void count(Counter counter, uint64_t n = 1) {
  detail::counter_cells[static_cast<size_t>(counter)].value.fetch_add(n, std::memory_order_relaxed);
}

inline uint64_t value(Counter counter) {
  return detail::counter_cells[static_cast<size_t>(counter)].value.load(std::memory_order_relaxed);
}

// Adds the microseconds that it lives to a counter.
class CountedTime {
 public:
  explicit CountedTime(Counter counter) : counter_(counter) {}
  ~CountedTime() {
    using std::chrono::microseconds;
    const auto time = std::chrono::steady_clock::now() - begin_;
    count(counter_, static_cast<uint64_t>(std::chrono::duration_cast<microseconds>(time).count()));
  }
  CountedTime(const CountedTime&) = delete;
  CountedTime& operator=(const CountedTime&) = delete;

 private:
  const Counter counter_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The name of a counter in snake_case.
const char* name(Counter counter);

// Counts under `group/key`, for example ("fallback", "aten::foo"). Takes a lock: for rare events.
// At most kMaxKeys different names are kept; what comes after them is counted as `group/(other)`.
inline constexpr size_t kMaxKeys = 10'000;
void count_keyed(std::string_view group, std::string_view key, uint64_t n = 1);

// The count under `group/key`, 0 if it was never counted.
uint64_t value_keyed(std::string_view group, std::string_view key);

// All counters in the order of the enum (zeros included), then the keyed ones as `group/key`,
// sorted. The values are read one after the other, not at one instant.
std::vector<std::pair<std::string, uint64_t>> snapshot_counters();

// Sets all counters to zero and drops the keyed ones. A count made at the same time by another
// thread may survive or be lost.
void reset_counters();

}  // namespace acc::base
