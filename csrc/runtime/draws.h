#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/runtime/generator.h"

// Which pieces of which random streams a step took, and where else it put them, and doing as much
// again: for replaying it (lazy/capture). Thread safe.
namespace acc::runtime {

struct Position {
  uint64_t seed = 0;
  uint64_t offset = 0;

  bool operator==(const Position&) const = default;
};

struct StreamEvent {
  // kLeft: the generator takes another stream.
  enum class What : uint8_t { kDrawn, kSeeded, kSet, kRead, kLeft };
  What what;
  std::shared_ptr<PhiloxState> stream;
  Position from;
  Position to;
  c10::weak_intrusive_ptr<Generator> generator;  // none for kRead
};

// From here to `logged_draws`, what all threads do with streams is noted, in order.
void log_draws();
std::vector<StreamEvent> logged_draws();

Position position(const PhiloxState& stream);
// Where the stream stood before.
Position advance(PhiloxState& stream, uint64_t increments);
void move_to(PhiloxState& stream, const Position& position);

}  // namespace acc::runtime
