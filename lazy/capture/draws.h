#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/runtime/draws.h"
#include "lazy/capture/recording.h"

// The random numbers of a captured step: a replay draws what the function would have drawn.
namespace acc::capture {

// Notes what a call did with random streams.
void note_draws(const std::vector<runtime::StreamEvent>& events, Recording& recording);

class Draws {
 public:
  // Learns from two calls which streams the step moves, and by how much, and which it seeds. Throws
  // when they do not move by as much, or to the same place, in both.
  void learn(const Recording& before, const Recording& latest);

  // Throws when a generator has another stream than when the call began.
  void check() const;

  // Takes from the streams what one call takes, and notes in its values where they stood.
  void draw(std::vector<int64_t>& values) const;

 private:
  struct Stream {
    std::shared_ptr<runtime::PhiloxState> state;
    bool moves = false;       // by `increments`; else the step seeds it: it is set to `end`
    uint64_t increments = 0;  // none where the step puts it back
    runtime::Position end;
  };
  struct Slot {  // of a draw in the value block
    uint32_t value;
    size_t stream;
    int64_t relative;
  };

  std::vector<Stream> streams_;
  std::vector<Slot> slots_;
  std::vector<CallGenerator> generators_;
};

}  // namespace acc::capture
