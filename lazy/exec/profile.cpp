#include "lazy/exec/profile.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"

namespace acc::exec {
namespace {

using Arguments = std::unordered_map<std::string, c10::IValue>;

void open(std::optional<at::RecordFunction>& range, at::RecordScope scope, std::string name,
          const std::vector<c10::IValue>* inputs = nullptr, const Arguments& more = {}) {
  std::optional<at::StepCallbacks> observers = at::getStepCallbacksUnlessEmpty(scope);
  if (!observers.has_value()) return;
  range.emplace(std::move(*observers));
  static const std::vector<c10::IValue> kNone;
  range->before(std::move(name), inputs == nullptr ? &kNone : inputs, &more);
}

// "aten::add" of "aten::add.Tensor", which is how PyTorch's own tables name it.
std::string_view without_overload(std::string_view op) { return op.substr(0, op.rfind('.')); }

std::string_view short_name(std::string_view op) {
  op = without_overload(op);
  const size_t colons = op.rfind("::");
  return colons == std::string_view::npos ? op : op.substr(colons + 2);
}

// "acc: fused: add, mul, relu (7 operators)".
std::string fused_name(const plan::Plan& plan, const plan::Step& step) {
  constexpr size_t kNames = 6;  // tables cut off what is longer
  std::vector<std::string_view> names;
  for (const uint32_t node : step.nodes) {
    const std::string_view name = short_name(plan.program.nodes[node].op->name);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  std::string text = "acc: fused: ";
  for (size_t i = 0; i < std::min(names.size(), kNames); ++i) {
    text.append(i == 0 ? "" : ", ").append(names[i]);
  }
  if (names.size() > kNames) text += ", ...";
  return base::concat(text, " (", step.nodes.size(), " operators)");
}

// What there is to know of a kernel, for observers that ask for inputs.
Arguments kernel_details(const plan::Plan& plan, const plan::Step& step) {
  std::string operators;
  for (const uint32_t node : step.nodes) {
    operators.append(operators.empty() ? "" : ", ").append(plan.program.nodes[node].op->name);
  }
  int64_t elements = 0;
  for (const passes::Launch& launch : step.launches) elements += launch.elements;
  return {{"operators", std::move(operators)},
          {"elements", elements},
          {"launches", static_cast<int64_t>(step.launches.size())}};
}

}  // namespace

Profile::Profile(const plan::Plan& plan, const plan::Schedule& schedule, const Places& places)
    : plan_(plan),
      schedule_(schedule),
      places_(places),
      observed_(at::hasCallbacks() && at::isRecordFunctionEnabled()) {
  if (!observed_) return;
  constexpr size_t kDigits = 8;  // enough to tell plans apart
  size_t operators = 0;
  for (const plan::Step& step : schedule.steps) operators += step.nodes.size();
  open(run_, at::RecordScope::FUNCTION,
       base::concat("acc: plan ", base::to_hex(plan.key).substr(0, kDigits), " (",
                    schedule.steps.size(), " steps, ", operators, " operators)"));
}

void Profile::begin_step(size_t index, const std::vector<c10::IValue>* arguments) {
  const plan::Step& step = schedule_.steps[index];
  step_.reset();
  std::string place = place_of(step);
  if (place != place_name_) {
    place_.reset();
    if (!place.empty()) {
      open(place_, at::RecordScope::USER_SCOPE, base::concat("acc: at ", place));
    }
    place_name_ = std::move(place);
  }
  if (step.kernel != plan::kNoKernel) {
    open(step_, at::RecordScope::FUNCTION, fused_name(plan_, step), nullptr,
         kernel_details(plan_, step));
  } else {
    const std::string_view op = plan_.program.nodes[step.nodes[0]].op->name;
    open(step_, at::RecordScope::FUNCTION, base::concat("acc: ", without_overload(op)), arguments);
  }
}

void Profile::begin_piece(size_t steps) {
  step_.reset();
  place_.reset();
  place_name_.clear();
  open(step_, at::RecordScope::FUNCTION, base::concat("acc: captured work (", steps, " steps)"));
}

// Where the step was recorded: a kernel often at several places.
std::string Profile::place_of(const plan::Step& step) const {
  constexpr size_t kPlaces = 3;  // tables cut off what is longer
  std::vector<uint32_t> found;
  for (const uint32_t index : step.nodes) {
    const graph::Node& node = plan_.program.nodes[index];
    const std::vector<uint32_t>& known = places_.of_recorded;
    uint32_t place = node.origin < known.size() ? known[node.origin] : 0;
    if (place == 0) place = node.source;
    if (place != 0 && std::ranges::find(found, place) == found.end()) found.push_back(place);
  }
  std::string text;
  for (size_t i = 0; i < std::min(found.size(), kPlaces); ++i) {
    text.append(i == 0 ? "" : "; ").append(places_.text(found[i]));
  }
  if (found.size() > kPlaces) text += base::concat("; ", found.size() - kPlaces, " more");
  return text;
}

}  // namespace acc::exec
