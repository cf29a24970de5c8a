#include "torchacc_device/csrc/plan_bindings.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "csrc/runtime/backend.h"
#include "lazy/record/source.h"
#include "lazy/session/session.h"

namespace acc::bindings {
namespace {

namespace py = pybind11;
using plan::Description;

py::list nodes_of(const Description& plan) {
  py::list rows;
  for (const Description::Node& node : plan.nodes) {
    const record::Source source = record::source_of(node.source);
    py::dict row;
    row["op"] = node.op;
    row["text"] = node.text;
    row["file"] = source.file;
    row["line"] = source.line;
    row["function"] = source.function;
    row["autograd"] = source.node;
    row["step"] = node.step;
    row["reads"] = node.reads;
    row["writes"] = node.writes;
    rows.append(std::move(row));
  }
  return rows;
}

py::list steps_of(const Description& plan) {
  py::list rows;
  for (const Description::Step& step : plan.steps) {
    py::dict row;
    row["nodes"] = step.nodes;
    row["kernel"] = step.kernel < 0 ? py::object(py::none()) : py::cast(step.kernel);
    row["launches"] = step.launches;
    row["seconds"] = step.seconds < 0 ? py::object(py::none()) : py::cast(step.seconds);
    row["held_bytes"] = step.held_bytes;
    rows.append(std::move(row));
  }
  return rows;
}

py::list buffers_of(const Description& plan) {
  py::list rows;
  for (const Description::Buffer& buffer : plan.buffers) {
    py::dict row;
    row["kind"] = buffer.kind;
    row["place"] = buffer.place;
    row["bytes"] = buffer.bytes;
    row["offset"] = buffer.offset;
    row["group"] = buffer.group;
    row["first"] = buffer.first;
    row["last"] = buffer.last;
    row["output"] = buffer.output;
    rows.append(std::move(row));
  }
  return rows;
}

py::object plan_data(int device, bool largest) {
  std::optional<session::LastPlan> last;
  {
    py::gil_scoped_release release;
    runtime::check_device(static_cast<c10::DeviceIndex>(device));
    last = session::describe_plan(static_cast<c10::DeviceIndex>(device), largest);
  }
  if (!last.has_value()) return py::none();
  const Description& plan = last->description;
  py::list kernels;
  for (size_t i = 0; i < plan.kernels.size(); ++i) {
    py::dict row;
    row["name"] = last->kernels[i].name;
    row["cuda_text"] = last->kernels[i].cuda_text;
    row["operations"] = plan.kernels[i].operations;
    row["operands"] = plan.kernels[i].operands;
    kernels.append(std::move(row));
  }
  py::dict result;
  result["device"] = device;
  result["cuda_preamble"] = last->cuda_preamble;
  result["cuda_options"] = last->cuda_options;
  result["ended_by"] = last->ended_by;
  result["loop"] = last->loop;
  result["recorded"] = plan.recorded;
  result["arena_bytes"] = plan.arena_bytes;
  result["peak_bytes"] = plan.peak_bytes;
  result["timed_runs"] = plan.timed_runs;
  result["waits_for_kernels"] = plan.waits_for_kernels;
  result["nodes"] = nodes_of(plan);
  result["steps"] = steps_of(plan);
  result["buffers"] = buffers_of(plan);
  result["kernels"] = std::move(kernels);
  return result;
}

}  // namespace

void bind_plans(py::module_& m) {
  m.def("plan_data", &plan_data, py::arg("device"), py::arg("largest") = false,
        "The plan that ran last on a device, as dicts and lists; None when none has.");
  m.def(
      "time_plans",
      [](bool on) {
        py::gil_scoped_release release;
        session::time_plans(on);
      },
      py::arg("on"), "While this is on, runs take the time of each of their steps.");
}

}  // namespace acc::bindings
