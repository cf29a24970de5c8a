#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/runtime/draws.h"
#include "lazy/capture/tensors.h"
#include "lazy/plan/plan.h"
#include "lazy/record/recorder.h"
#include "lazy/record/watch.h"

// What one call of the function recorded, and whether two calls recorded the same.
namespace acc::capture {

// A tensor that a call took or returned.
struct Given {
  WeakStorage storage;
  Geometry geometry;
  int64_t first_byte;
};

// Whether a position in a stream follows from where the stream stood before the call: not once it
// was seeded; perhaps, where it was set to another offset. Both, where it was put back to a place
// where it had been before and after it was seeded.
enum class Follows : uint8_t { kYes, kPerhaps, kNo, kBoth };

// A random stream that a call touched.
struct CallStream {
  std::shared_ptr<runtime::PhiloxState> state;
  runtime::Position start;
  runtime::Position end;
  Follows follows = Follows::kYes;  // the end
};

// A generator that a call used, and the stream that it had before.
struct CallGenerator {
  c10::weak_intrusive_ptr<runtime::Generator> generator;
  std::shared_ptr<runtime::PhiloxState> stream;
};

// A piece that a call took of a stream.
struct CallDraw {
  size_t stream;  // of the call's
  runtime::Position begin;
  Follows follows;
};

struct Recording {
  size_t call = 0;                     // its number, from 1 on
  std::shared_ptr<plan::Plan> plan;    // that it ran with
  graph::Graph graph;                  // the plan's, at the places of this call
  std::vector<record::Cut> cuts;       // what made more than one plan of it
  size_t devices = 0;                  // that it recorded something on
  std::vector<record::Entry> entries;  // per buffer; memory: of constants only
  std::vector<bool> born;              // per buffer: its storage was made by the call
  std::vector<bool> alive;             // per buffer: somebody holds what was made
  std::vector<int64_t> values;
  std::vector<CallStream> streams;
  std::vector<CallDraw> draws;
  std::vector<CallGenerator> generators;
  std::vector<Given> arguments;
  std::vector<Given> results;
  std::string lost;  // why constants could not be kept; then there are no entries

  // Notes a trace that is about to run, which it does whatever comes of this.
  void note(const record::Trace& trace, const std::shared_ptr<plan::Plan>& of,
            const std::vector<bool>& held, c10::DeviceIndex device);
};

// Throws unless the call was recorded as one plan.
void check_whole(const Recording& recording);

// Throws unless both calls recorded the same operators with the same numbers; where random
// operators draw (draws.h) is not looked at.
void compare(const Recording& before, const Recording& latest);

// What errors call an operator, and a buffer of the graph: by the operator that touches it first.
std::string node_text(const graph::Node& node);
std::string buffer_text(const graph::Graph& graph, uint32_t buffer);

}  // namespace acc::capture
