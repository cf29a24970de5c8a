#include "lazy/capture/draws.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

#include "csrc/base/check.h"
#include "lazy/graph/draws.h"

namespace acc::capture {
namespace {

runtime::Position drawn_at(const graph::Node& node, const std::vector<int64_t>& values) {
  const size_t end = node.values + node.n_values;
  return {static_cast<uint64_t>(values[end - 2]), static_cast<uint64_t>(values[end - 1])};
}

void note_generator(const runtime::StreamEvent& event, std::vector<CallGenerator>& generators) {
  const auto* generator = event.generator._unsafe_get_target();
  if (generator == nullptr) return;
  const bool known = std::ranges::any_of(generators, [&](const CallGenerator& each) {
    return each.generator._unsafe_get_target() == generator;
  });
  if (!known) generators.push_back({event.generator, event.stream});
}

}  // namespace

void note_draws(const std::vector<runtime::StreamEvent>& events, Recording& recording) {
  using What = runtime::StreamEvent::What;
  // Where a stream was read. Who sets it to such a place puts it back (fork_rng, checkpointing).
  struct Place {
    const runtime::PhiloxState* stream;
    runtime::Position at;
    Follows follows;
  };
  std::vector<Place> places;
  for (const runtime::StreamEvent& event : events) {
    note_generator(event, recording.generators);
    if (event.what == What::kLeft) continue;
    auto& streams = recording.streams;
    const auto found = std::ranges::find(streams, event.stream, &CallStream::state);
    if (event.what == What::kRead) {
      const Follows follows = found == streams.end() ? Follows::kYes : found->follows;
      places.push_back({event.stream.get(), event.from, follows});
      continue;
    }
    const auto index = static_cast<size_t>(found - streams.begin());
    if (found == streams.end()) {
      streams.push_back({.state = event.stream, .start = event.from, .end = event.from});
    }
    CallStream& stream = streams[index];
    stream.end = event.to;
    if (event.what == What::kDrawn) {
      recording.draws.push_back({index, event.from, stream.follows});
    } else if (event.what == What::kSeeded) {
      stream.follows = Follows::kNo;
    } else {
      std::optional<Follows> back;
      for (const Place& place : places) {
        if (place.stream != event.stream.get() || place.at != event.to) continue;
        back = back.value_or(place.follows) == place.follows ? place.follows : Follows::kBoth;
      }
      const bool same_seed = event.to.seed == stream.start.seed;
      stream.follows = back.value_or(same_seed ? Follows::kPerhaps : Follows::kNo);
    }
  }
}

namespace {

// A position in a stream of a call, and one in a call before.
struct Compared {
  const CallStream& stream;
  const CallStream* before;  // null: the generator is a new one at each call
  runtime::Position was;
  runtime::Position is;
  Follows follows;
};

bool moved_alike(const Compared& at) {
  return (at.follows == Follows::kYes || at.follows == Follows::kPerhaps) && at.before != nullptr &&
         at.is.seed == at.stream.start.seed && at.was.seed == at.before->start.seed &&
         at.is.offset - at.stream.start.offset == at.was.offset - at.before->start.offset;
}

bool seeded_alike(const Compared& at) {
  return at.follows != Follows::kBoth && (at.follows != Follows::kYes || at.before == nullptr) &&
         at.is == at.was;
}

const CallStream* same_stream(const Recording& recording, const CallStream& stream) {
  const auto found = std::ranges::find(recording.streams, stream.state, &CallStream::state);
  return found == recording.streams.end() ? nullptr : &*found;
}

void check_clear(Follows follows, const runtime::Position& at) {
  ACC_CHECK(follows != Follows::kBoth, "[torchacc.capture] a generator is put back to seed ",
            at.seed, ", offset ", at.offset,
            ", where it stood both before and after the function seeded it: nothing tells which of "
            "the two was meant. Seed it outside of the function.");
}

}  // namespace

void Draws::learn(const Recording& previous, const Recording& latest) {
  const auto& draws = latest.draws;
  size_t next = 0;
  for (const graph::Node& node : latest.graph.nodes) {
    if (!graph::draws_numbers(*node.op)) continue;
    const runtime::Position was = drawn_at(node, previous.values);
    const runtime::Position is = drawn_at(node, latest.values);
    size_t at = next;
    while (at < draws.size() && draws[at].begin != is) ++at;
    for (size_t i = 0; at == draws.size() && i < next; ++i) {
      if (draws[i].begin == is) at = i;
    }
    bool fits = at < draws.size();
    if (fits) {
      next = at + 1;
      check_clear(draws[at].follows, is);
      const CallStream& stream = latest.streams[draws[at].stream];
      const Compared place{stream, same_stream(previous, stream), was, is, draws[at].follows};
      fits = seeded_alike(place);
      if (!fits && moved_alike(place)) {
        fits = true;
        const auto value = node.values + node.n_values - 2;
        slots_.push_back(
            {value, draws[at].stream, static_cast<int64_t>(is.offset - stream.start.offset)});
      }
    }
    ACC_CHECK(fits, "[torchacc.capture] ", node_text(node), " drew at seed ", was.seed, ", offset ",
              was.offset, " in call ", previous.call, " and at seed ", is.seed, ", offset ",
              is.offset, " in call ", latest.call,
              ": the generator does not move by as much at each call. Seed it outside of the "
              "function.");
  }
  for (const CallStream& stream : latest.streams) {
    check_clear(stream.follows, stream.end);
    const CallStream* before = same_stream(previous, stream);
    const runtime::Position was = before == nullptr ? stream.end : before->end;
    const Compared end{stream, before, was, stream.end, stream.follows};
    const bool seeds = seeded_alike(end);
    ACC_CHECK(seeds || moved_alike(end), "[torchacc.capture] a generator ended call ",
              previous.call, " at seed ", was.seed, ", offset ", was.offset, " and call ",
              latest.call, " at seed ", stream.end.seed, ", offset ", stream.end.offset,
              ": it is neither moved by as much nor seeded alike at each call. Seed it outside of "
              "the function.");
    streams_.push_back({.state = stream.state,
                        .moves = !seeds,
                        .increments = stream.end.offset - stream.start.offset,
                        .end = stream.end});
  }
  generators_ = latest.generators;
}

void Draws::check() const {
  for (const CallGenerator& each : generators_) {
    const auto generator = each.generator.lock();
    ACC_CHECK(
        !generator || generator->stream() == each.stream,
        "[torchacc.capture] a generator that the step uses was given the state of another one "
        "since capture (graphsafe_set_state), and a replay would go on with the one it had. "
        "Seed it instead (manual_seed, set_state), or capture the step again.");
  }
}

void Draws::draw(std::vector<int64_t>& values) const {
  c10::SmallVector<runtime::Position, 2> begins;
  for (const Stream& stream : streams_) {
    if (stream.moves) {
      begins.push_back(runtime::advance(*stream.state, stream.increments));
    } else {
      begins.push_back(runtime::position(*stream.state));
      runtime::move_to(*stream.state, stream.end);
    }
  }
  for (const Slot& slot : slots_) {
    values[slot.value] = static_cast<int64_t>(begins[slot.stream].seed);
    values[slot.value + 1] = static_cast<int64_t>(begins[slot.stream].offset) + slot.relative;
  }
}

}  // namespace acc::capture
