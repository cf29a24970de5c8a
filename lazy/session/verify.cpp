#include "lazy/session/verify.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/on_device.h"
#include "lazy/record/source.h"
#include "lazy/session/replay.h"

namespace acc::session {
namespace {

using exec::Given;

std::unique_ptr<VerifiedStep>& current() {
  static thread_local std::unique_ptr<VerifiedStep> state;
  return state;
}

// Inputs that the run of another plan may write.
std::vector<Given> copies_of(const std::vector<Given>& given, const plan::Plan& plan,
                             c10::DeviceIndex device) {
  const runtime::OnDevice on_device(device);
  std::vector<Given> made(given.size());
  std::map<const void*, c10::Storage> copies;  // views of one storage share their copy
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].memory) continue;
    if (plan.graph.buffers[i].kind == graph::BufferKind::kHost) {
      made[i] = given[i];
      continue;
    }
    const c10::Storage& memory = given[i].memory;
    c10::Storage& copy = copies[memory.data()];
    if (!copy) {
      copy = exec::allocate(memory.nbytes());
      runtime::backend().copy(copy.mutable_data(), memory.data(), memory.nbytes(), device);
    }
    made[i] = {copy, given[i].byte_offset};
  }
  return made;
}

void keep_all(const plan::Plan& plan, c10::DeviceIndex device, const std::vector<Given>& given,
              std::span<const int64_t> values, exec::Verified* verified) {
  std::vector<bool> alive;
  alive.reserve(plan.graph.buffers.size());
  for (const graph::Buffer& buffer : plan.graph.buffers) {
    alive.push_back(buffer.kind == graph::BufferKind::kFresh);
  }
  const auto wider = make_plan(plan.graph, plan.key, std::move(alive), plan.options);
  const exec::Outcome outcome =
      exec::verify(*wider, device, copies_of(given, plan, device), values, verified);
  if (outcome.error != nullptr) std::rethrow_exception(outcome.error);
}

}  // namespace

void begin_verify() {
  ACC_CHECK(current() == nullptr,
            "[torchacc.verify] was called by a step that is being verified. Verify one of them.");
  current() = std::make_unique<VerifiedStep>();
}

VerifiedStep end_verify() {
  const std::unique_ptr<VerifiedStep> state = std::exchange(current(), nullptr);
  if (state == nullptr) return {};
  for (const exec::Verified* each : {&state->all_kept, &state->as_planned}) {
    std::ranges::copy(each->problems, std::back_inserter(state->problems));
  }
  return std::move(*state);
}

bool verifies() { return current() != nullptr; }

exec::Outcome run_verified(plan::Plan& plan, c10::DeviceIndex device, std::vector<Given> given,
                           std::span<const int64_t> values) {
  VerifiedStep& state = *current();
  ++state.plans;
  try {
    keep_all(plan, device, given, values, &state.all_kept);
  } catch (const std::exception& error) {
    if (runtime::is_interrupt(error)) throw;
    state.problems.emplace_back(error.what());
  }
  try {
    return exec::verify(plan, device, given, values, &state.as_planned);
  } catch (const std::exception& error) {
    if (runtime::is_interrupt(error)) throw;
    // The step of the program is done all the same.
    if (state.problems.empty()) state.problems.emplace_back(error.what());
    const auto make_way = [](uint64_t, std::vector<Given>&) { return exec::Way::kNoMemory; };
    return exec::run(plan, device, std::move(given), values, {{}, &record::short_source_text},
                     make_way, nullptr);
  }
}

}  // namespace acc::session
