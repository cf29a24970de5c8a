#pragma once

#include <cstdint>
#include <string>
#include <vector>

// A plan as plain values, to be shown to people.
namespace acc::plan {

struct Plan;
struct Schedule;

struct Description {
  // An operator that runs.
  struct Node {
    std::string op;    // "aten::add.Tensor"
    std::string text;  // its line in the form of lazy/graph/print.h
    uint32_t source = 0;
    uint32_t step = 0;            // of `steps`
    std::vector<uint32_t> reads;  // buffers, each once
    std::vector<uint32_t> writes;
  };
  // An operator by itself, or what one generated kernel computes.
  struct Step {
    std::vector<uint32_t> nodes;
    int64_t kernel = -1;  // of `kernels`; -1: the operator's own
    uint32_t launches = 0;
    double seconds = -1;      // in the fastest timed run; negative: not timed
    uint64_t held_bytes = 0;  // that the plan holds while it runs: the arena and blocks, not inputs
  };
  struct Buffer {
    const char* kind = "";   // "input", "fresh" or "host"
    const char* place = "";  // "given", "arena", "own", "adopted", or "none": in no memory
    // Of an input: up to the last byte that the plan touches.
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in the arena
    uint32_t group = 0;   // the first buffer of the same storage
    // Steps that touch it first and last; only where there is a place.
    uint32_t first = 0;
    uint32_t last = 0;
    bool output = false;  // kept for the program when the plan ends
  };
  struct Kernel {
    uint32_t operations = 0;  // on each element, loads included
    uint32_t operands = 0;
  };

  std::vector<Node> nodes;
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  std::vector<Kernel> kernels;
  uint64_t recorded = 0;  // operators before any pass
  uint64_t arena_bytes = 0;
  uint64_t peak_bytes = 0;  // the most that a step holds
  uint32_t timed_runs = 0;
  bool waits_for_kernels = false;  // it has kernels, and this schedule is the one without them
};

// `schedule` is one of the plan's.
Description describe(const Plan& plan, const Schedule& schedule);

}  // namespace acc::plan
