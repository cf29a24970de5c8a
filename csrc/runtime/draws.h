#pragma once

#include <cstdint>
#include <memory>
#include <vector>

// Which pieces of which random streams a step took, and taking as much again: for replaying it
// (lazy/capture). Thread safe.
namespace acc::runtime {

class PhiloxState;

struct Position {
  uint64_t seed = 0;
  uint64_t offset = 0;

  bool operator==(const Position&) const = default;
};

struct Draw {
  std::shared_ptr<PhiloxState> stream;
  Position begin;
};

// From here to `logged_draws`, the draws of all threads are noted, in order.
void log_draws();
std::vector<Draw> logged_draws();

Position position(const PhiloxState& stream);
// Where the stream stood before.
Position advance(PhiloxState& stream, uint64_t increments);
void move_to(PhiloxState& stream, const Position& position);

}  // namespace acc::runtime
