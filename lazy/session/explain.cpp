#include "lazy/session/explain.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/ambient.h"
#include "lazy/session/reasons.h"

namespace acc::session {
namespace {

using base::concat;
using plan::Change;
using plan::kAnotherOperator;
using record::FlushReason;

constexpr size_t kMostNews = 256;
// Of plans that begin alike, the latest are compared operator by operator: a device may keep
// thousands.
constexpr size_t kMostCompared = 4;

struct Kept {
  std::mutex mutex;
  std::deque<NewPlan> plans;
  uint64_t forgotten = 0;
};

// Never destroyed: threads may still submit while the process exits.
Kept& kept() {
  static auto& state = *new Kept;
  return state;
}

std::string settings_text(const plan::Difference& found) {
  std::string text;
  for (const auto& each : runtime::changed_settings(found.ambient_before, found.ambient_after)) {
    text += concat(text.empty() ? "" : ", ", each.name, ": ", each.before, " -> ", each.after);
  }
  return text;
}

std::string changed_text(const NewPlan& made) {
  const plan::Difference& found = made.difference;
  switch (found.change) {
    case Change::kNothing:
      break;
    case Change::kSetting:
      return concat(found.op, " was recorded under other settings: ", settings_text(found));
    case Change::kOperator:
      return concat(found.after, " instead of ", found.before,
                    found.aspect == kAnotherOperator ? "" : concat(" (", found.aspect, ")"));
    case Change::kLonger:
      return concat(found.after, " where the step has ended before (", found.aspect, ")");
    case Change::kShorter:
      return concat("the step ends before ", found.before, " (", found.aspect, ")",
                    is_cut(made.reason) ? concat(": ", cut_text(made.reason)) : "");
    case Change::kArgument:
    case Change::kMemory:
      return concat(found.op, found.argument.empty() ? "" : concat(", ", found.argument), ": ",
                    found.aspect, " ", found.before, " -> ", found.after);
  }
  return "the step is as before, and its plan was dropped";
}

}  // namespace

const char* name(Why why) {
  constexpr std::array kNames{"first", "other", "changed", "rest", "kept"};
  return kNames[static_cast<size_t>(why)];
}

std::string text_of(const NewPlan& made) {
  switch (made.why) {
    case Why::kFirst:
      return "the first plan";
    case Why::kOther:
      return concat("begins with ", made.difference.op, ", as no plan that is kept");
    case Why::kRest:
      return "the rest of the step that the plan before has cut";
    case Why::kKept:
      return concat("a result of ", made.difference.op, " is still held when the step ends");
    case Why::kChanged:
      break;
  }
  return changed_text(made);
}

uint32_t place_of(const NewPlan& made) {
  const bool ends = made.why == Why::kRest ||
                    (made.why == Why::kChanged && made.difference.change == Change::kShorter);
  return ends && made.submitted_at != 0 ? made.submitted_at : made.difference.source;
}

NewPlan explain(const graph::Graph& now, const Plans& plans, const plan::Plan* expected) {
  NewPlan made;
  made.operators = now.nodes.size();
  if (!now.nodes.empty()) {
    made.difference.op = now.nodes[0].op->name;
    made.difference.source = now.nodes[0].source;
  }
  if (plans.size() == 0) return made;

  size_t most = 0;
  std::vector<const plan::Plan*> alike;  // those that begin with most of the operators
  plans.for_each([&](const std::shared_ptr<plan::Plan>& each, uint64_t) {
    const size_t common = plan::common_operators(each->graph, now);
    if (common > most) alike.clear();
    most = std::max(most, common);
    if (common == most && (alike.size() < kMostCompared || each.get() == expected)) {
      alike.push_back(each.get());
    }
  });
  // The first of those is the plan that was used last.
  if (most == 0) alike = {expected != nullptr ? expected : alike.front()};

  std::optional<plan::Difference> nearest;
  for (const plan::Plan* each : alike) {
    plan::Difference found = plan::difference(each->graph, now);
    const bool nearer = !nearest.has_value() || found.node > nearest->node ||
                        (found.node == nearest->node && each == expected);
    if (nearer) nearest = std::move(found);
  }
  const bool another = most == 0 && nearest->aspect == kAnotherOperator && expected == nullptr;
  made.why = another ? Why::kOther : Why::kChanged;
  if (!another) made.difference = std::move(*nearest);
  return made;
}

NewPlan explain_kept(const plan::Plan& plan, const std::vector<bool>& alive) {
  NewPlan made;
  made.why = Why::kKept;
  made.operators = plan.graph.nodes.size();
  for (const graph::Node& node : plan.graph.nodes) {
    for (const graph::Use& use : graph::uses(plan.graph, node)) {
      if (!use.writes || !alive[use.buffer] || plan.outputs[use.buffer]) continue;
      made.difference.op = node.op->name;
      made.difference.source = node.source;
      return made;
    }
  }
  return made;
}

void note(NewPlan made) {
  Kept& state = kept();
  const std::lock_guard lock(state.mutex);
  state.plans.push_back(std::move(made));
  if (state.plans.size() <= kMostNews) return;
  state.plans.pop_front();
  ++state.forgotten;
}

News take_news() {
  Kept& state = kept();
  const std::lock_guard lock(state.mutex);
  News news;
  news.plans.assign(std::make_move_iterator(state.plans.begin()),
                    std::make_move_iterator(state.plans.end()));
  news.forgotten = std::exchange(state.forgotten, 0);
  state.plans.clear();
  return news;
}

}  // namespace acc::session
