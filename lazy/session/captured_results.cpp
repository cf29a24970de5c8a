#include "lazy/session/captured_results.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/exhaustion.h"
#include "csrc/runtime/on_device.h"

namespace acc::session {

using exec::Way;

void CapturedResults::remember(const record::Trace& trace, const exec::Outcome& outcome,
                               const std::vector<exec::Output>& outputs) {
  if (outcome.capture == 0) return;
  const auto [entry, is_new] = results_.try_emplace(outcome.capture);
  std::vector<Result>& results = entry->second;
  results.clear();
  for (const auto& [buffer, memory] : outputs) {
    if (buffer >= trace.entries.size() || memory.nbytes() == 0) continue;
    const auto impl =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory.unsafeGetStorageImpl());
    results.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(impl), outcome.keeper,
                       trace.entries[buffer].storage});
  }
  if (!is_new) return;
  // Of captures that are gone nobody asks any more.
  std::erase_if(results_, [](const auto& each) {
    return std::ranges::all_of(each.second,
                               [](const Result& result) { return result.memory.expired(); });
  });
}

Way CapturedResults::make_way(uint64_t number, std::vector<exec::Given>& given,
                              c10::DeviceIndex device) {
  for (auto results = results_.lower_bound(number); results != results_.end();) {
    while (!results->second.empty()) {
      const Way way = move_away(results->second.back(), given, device);
      if (way != Way::kFree) return way;
      results->second.pop_back();
    }
    results = results->first == number ? std::next(results) : results_.erase(results);
  }
  return Way::kFree;
}

Way CapturedResults::move_away(const Result& result, std::vector<exec::Given>& given,
                               c10::DeviceIndex device) {
  const c10::Storage memory(result.memory.lock());
  if (!memory) return Way::kFree;
  const auto storage = result.storage.lock();
  const bool held = storage && storage->has_memory() &&
                    storage->memory().unsafeGetStorageImpl() == memory.unsafeGetStorageImpl();
  const auto is_it = [&](const exec::Given& each) {
    return each.memory.unsafeGetStorageImpl() == memory.unsafeGetStorageImpl();
  };
  const auto inputs = static_cast<size_t>(std::ranges::count_if(given, is_it));
  const size_t others =
      memory.use_count() - 1 - (result.keeper.expired() ? 0 : 1) - (held ? 1 : 0) - inputs;
  if (others == 0 && !held && inputs == 0) return Way::kFree;
  if (others > 0 || (held && (storage->pinned || storage->observed))) return Way::kTaken;
  const runtime::OnDevice on_device(device);
  c10::Storage copy;
  try {
    copy = exec::allocate(memory.nbytes());
  } catch (...) {
    if (runtime::is_out_of_memory(std::current_exception())) return Way::kNoMemory;
    throw;
  }
  runtime::backend().copy(copy.mutable_data(), memory.data(), memory.nbytes(), device);
  for (exec::Given& each : given) {
    if (is_it(each)) each.memory = copy;
  }
  if (held) storage->set_memory(std::move(copy));
  base::count(base::Counter::ResultsMoved);
  return Way::kFree;
}

}  // namespace acc::session
