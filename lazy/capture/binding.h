#pragma once

#include <cstdint>
#include <vector>

#include "lazy/capture/recording.h"
#include "lazy/capture/tensors.h"

// Where each buffer of a captured plan, and each result, comes from at a replay.
namespace acc::capture {

struct Binding {
  enum class Kind : uint8_t { kMade, kArgument, kState, kConstant };
  Kind kind = Kind::kMade;
  uint32_t argument = 0;
  int64_t byte_offset = 0;             // for an argument: from where it begins
  int64_t reach = 0;                   // bytes that the plan touches from there
  WeakStorage storage = no_storage();  // of state, and of what a call left behind, constants too
  size_t nbytes = 0;                   // of the storage
  c10::Storage memory;                 // of a constant
};

struct Argument {
  Geometry geometry;
  uint32_t same = 0;                  // the first argument of the same storage
  int64_t distance = 0;               // in bytes from that one
  bool written = false;               // by the step
  WeakStorage stayed = no_storage();  // the storage that it was in in both calls,
  bool moved = false;                 // and whether it began somewhere else there
};

struct Result {
  Binding::Kind kind = Binding::Kind::kMade;
  uint32_t index = 0;    // buffer, or argument
  int64_t distance = 0;  // in bytes from where the argument begins
  Geometry geometry;
  WeakStorage storage = no_storage();  // of arguments and state
};

struct Bindings {
  std::vector<Binding> buffers;
  std::vector<Argument> arguments;
  std::vector<Result> results;
};

// Finds out by comparing two calls. `arguments` and `results` are those of the latest one. Throws
// when a buffer or a result is something that no replay could find again.
Bindings bindings_of(const Recording& before, const Recording& latest,
                     const std::vector<at::Tensor>& arguments,
                     const std::vector<at::Tensor>& results);

}  // namespace acc::capture
