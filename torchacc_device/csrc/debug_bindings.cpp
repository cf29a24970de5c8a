#include "torchacc_device/csrc/debug_bindings.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "csrc/aten/record_kernel.h"
#include "csrc/base/stats.h"
#include "lazy/record/source.h"
#include "lazy/session/explain.h"
#include "lazy/session/reasons.h"
#include "lazy/session/strict.h"
#include "lazy/session/verify.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;
using session::NewPlan;

const char* name(plan::Change change) {
  switch (change) {
    case plan::Change::kOperator:
    case plan::Change::kLonger:
    case plan::Change::kShorter:
      return "operator";
    case plan::Change::kSetting:
      return "setting";
    case plan::Change::kArgument:
      return "argument";
    case plan::Change::kMemory:
      return "memory";
    case plan::Change::kNothing:
      break;
  }
  return "";
}

py::dict new_plan(const NewPlan& made) {
  const plan::Difference& found = made.difference;
  const bool changed = made.why == session::Why::kChanged;
  py::dict row;
  row["why"] = session::name(made.why);
  row["text"] = session::text_of(made);
  row["place"] = record::short_source_text(session::place_of(made));
  row["device"] = static_cast<int>(made.device);
  row["operators"] = made.operators;
  row["ended_by"] = base::name(session::counter_of(made.reason));
  row["changed"] = changed ? name(found.change) : "";
  row["operator"] = found.op;
  row["argument"] = changed ? found.argument : "";
  row["aspect"] = changed ? found.aspect : "";
  row["before"] = changed ? found.before : "";
  row["after"] = changed ? found.after : "";
  return row;
}

py::tuple new_plans() {
  const session::News news = session::take_news();
  py::list rows;
  for (const NewPlan& made : news.plans) rows.append(new_plan(made));
  return py::make_tuple(std::move(rows), news.forgotten);
}

std::vector<std::pair<std::string, std::string>> named(const std::vector<exec::NamedOp>& ops) {
  std::vector<std::pair<std::string, std::string>> rows;
  rows.reserve(ops.size());
  for (const auto& [op, source] : ops) rows.emplace_back(op, record::short_source_text(source));
  return rows;
}

py::dict verified(const exec::Verified& run) {
  py::list mismatches;
  for (const exec::Mismatch& found : run.mismatches) {
    py::dict row;
    row["operator"] = found.op.first;
    row["place"] = record::short_source_text(found.op.second);
    row["value"] = found.value;
    row["kernel"] = found.kernel;
    row["fused"] = named(found.fused);
    row["actual"] = found.actual;
    row["expected"] = found.expected;
    row["error"] = found.error;
    row["tolerance"] = found.tolerance;
    row["wrong"] = found.wrong;
    row["elements"] = found.elements;
    mismatches.append(std::move(row));
  }
  py::dict row;
  row["operators"] = run.operators;
  row["steps"] = run.steps;
  row["kernels"] = run.kernels;
  row["values"] = run.values;
  row["mismatches"] = std::move(mismatches);
  return row;
}

py::dict end_verify() {
  const session::VerifiedStep step = session::end_verify();
  py::dict row;
  row["plans"] = step.plans;
  row["as_planned"] = verified(step.as_planned);
  row["all_kept"] = verified(step.all_kept);
  row["problems"] = step.problems;
  return row;
}

}  // namespace

void bind_debugging(py::module_& m) {
  m.def("new_plans", &new_plans,
        "Why there were new plans since the last call, as dicts, and how many older ones are "
        "forgotten.");
  m.def(
      "strict",
      [] {
        const session::Strict now = session::strict();
        return py::make_tuple(now.on, now.warm_up);
      },
      "Whether this thread is in strict mode, and how many steps it may still warm up.");
  m.def(
      "set_strict", [](bool on, int64_t warm_up) { session::set_strict({on, warm_up}); },
      py::arg("on"), py::arg("warm_up"));
  m.def("excuse_step", &session::excuse_step, py::arg("on"),
        "Whether this thread's step may do as it likes in strict mode, and is none of the warm-up; "
        "its end ends that.");
  m.def("begin_verify", &session::begin_verify,
        "From here on the plans of this thread are compared with ATen, step by step.");
  m.def("end_verify", &end_verify, "What became of them.");
  m.def("run_eagerly", &aten::run_eagerly, py::arg("on"),
        "Whether this thread's operators run at once from now on; returns what was.");
}

}  // namespace acc::bindings
