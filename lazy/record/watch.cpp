#include "lazy/record/watch.h"

#include <atomic>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "csrc/base/check.h"

namespace acc::record {
namespace {

constexpr size_t kMaxCuts = 8;

struct Watch {
  std::mutex mutex;
  std::vector<Cut> cuts;
  std::unordered_set<const LazyStorage*> born;
};

// Never destroyed: storages may be made while static objects go.
Watch& watch() {
  static auto* const state = new Watch;
  return *state;
}

std::atomic<bool> on{false};
thread_local bool on_here = false;
thread_local const std::string* at_once = nullptr;

}  // namespace

RunsAtOnce::RunsAtOnce(const std::string& op) : before_(std::exchange(at_once, &op)) {}
RunsAtOnce::~RunsAtOnce() { at_once = before_; }

void start_watching() {
  ACC_CHECK(!on_here,
            "[torchacc.capture] a captured step was called within another one. Call the function "
            "that it was made of.");
  ACC_CHECK(!on.exchange(true),
            "[torchacc.capture] another thread records a step. Capture one at a time.");
  on_here = true;
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  state.cuts.clear();
  state.born.clear();
}

void stop_watching() noexcept {
  if (!on_here) return;
  on_here = false;
  on.store(false);
}

bool watching() { return on.load(std::memory_order_relaxed); }

bool watching_here() { return on_here; }

void note_cut(FlushReason reason, c10::DeviceIndex device) {
  const uint32_t source = source_here();
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  if (state.cuts.size() < kMaxCuts) {
    state.cuts.push_back({reason, device, source, at_once != nullptr ? *at_once : std::string()});
  }
}

std::vector<Cut> cuts() {
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  return state.cuts;
}

void note_birth(const LazyStorage* storage) {
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  state.born.insert(storage);
}

bool was_born(const LazyStorage* storage) {
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  return state.born.contains(storage);
}

}  // namespace acc::record
