#include "lazy/capture/draws.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "csrc/base/check.h"

namespace acc::capture {
namespace {

runtime::Position drawn_at(const graph::Node& node, const std::vector<int64_t>& values) {
  const size_t end = node.values + node.n_values;
  return {static_cast<uint64_t>(values[end - 2]), static_cast<uint64_t>(values[end - 1])};
}

}  // namespace

bool is_draw(const graph::Op& op) {
  const size_t n = op.arguments.size();
  return op.name.starts_with("acc::") && n >= 2 && op.arguments[n - 2].name == "seed" &&
         op.arguments[n - 1].name == "offset";
}

void Draws::learn(const Recording& previous, const Recording& latest) {
  const auto& draws = latest.draws;
  const auto& before = previous.draws;
  std::vector<uint32_t> stream_of(draws.size());
  std::vector<runtime::Position> begins;
  std::vector<runtime::Position> begins_before;
  for (size_t i = 0; i < draws.size(); ++i) {
    auto found = std::ranges::find(streams_, draws[i].stream, &Stream::state);
    stream_of[i] = static_cast<uint32_t>(found - streams_.begin());
    if (found != streams_.end()) continue;
    Stream& stream = streams_.emplace_back();
    stream.state = draws[i].stream;
    stream.end = latest.ends[i];
    begins.push_back(draws[i].begin);
    // A stream that is where it was before the call was not seeded in it.
    const auto start = std::ranges::find(latest.starts, stream.state, &runtime::Draw::stream);
    stream.moves = start != latest.starts.end() && start->begin == draws[i].begin;
    const auto first = std::ranges::find(before, stream.state, &runtime::Draw::stream);
    begins_before.push_back(first == before.end() ? runtime::Position() : first->begin);
    if (stream.moves && first != before.end()) {
      const auto end = previous.ends[static_cast<size_t>(first - before.begin())];
      stream.same = end.offset - first->begin.offset == stream.end.offset - draws[i].begin.offset &&
                    end.seed == first->begin.seed && stream.end.seed == draws[i].begin.seed;
    }
    stream.increments = stream.end.offset - draws[i].begin.offset;
  }
  size_t next = 0;
  for (const graph::Node& node : latest.plan->graph.nodes) {
    if (!is_draw(*node.op)) continue;
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
      const uint32_t index = stream_of[at];
      const Stream& stream = streams_[index];
      const auto relative = static_cast<int64_t>(is.offset - begins[index].offset);
      if (stream.moves) {
        fits = stream.same && is.seed == begins[index].seed &&
               was.seed == begins_before[index].seed &&
               was.offset - begins_before[index].offset == is.offset - begins[index].offset;
        const auto value = node.values + node.n_values - 2;
        slots_.push_back({value, index, relative});
      } else {
        fits = was == is;
      }
    }
    ACC_CHECK(fits, "[torchacc.capture] ", node_text(node), " drew at seed ", was.seed, ", offset ",
              was.offset, " in call ", previous.call, " and at seed ", is.seed, ", offset ",
              is.offset, " in call ", latest.call,
              ": the generator does not move by as much at each call. Seed it outside of the "
              "function.");
  }
}

void Draws::draw(std::vector<int64_t>& values) const {
  c10::SmallVector<runtime::Position, 2> begins;
  for (const Stream& stream : streams_) {
    if (stream.moves) {
      begins.push_back(runtime::advance(*stream.state, stream.increments));
    } else {
      begins.emplace_back();
      runtime::move_to(*stream.state, stream.end);
    }
  }
  for (const Slot& slot : slots_) {
    values[slot.value] = static_cast<int64_t>(begins[slot.stream].seed);
    values[slot.value + 1] = static_cast<int64_t>(begins[slot.stream].offset) + slot.relative;
  }
}

}  // namespace acc::capture
