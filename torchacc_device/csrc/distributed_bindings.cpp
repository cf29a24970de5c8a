#include "torchacc_device/csrc/distributed_bindings.h"

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>

#include "distributed/behind.h"
#include "distributed/ledger.h"
#include "distributed/process_group.h"
#include "distributed/sends.h"
#include "torchacc_device/csrc/guarded.h"

namespace acc::bindings {

namespace py = pybind11;
using distributed::ProcessGroupACC;

bool bind_distributed(py::module_& m) {
  if (!py::hasattr(py::module_::import("torch._C"), "_c10d_init")) return false;
  py::module_::import("torch.distributed");
  py::class_<ProcessGroupACC, c10d::Backend, c10::intrusive_ptr<ProcessGroupACC>>(
      m, "ProcessGroupACC",
      "The process group of the device acc. Collectives on its tensors are operators of the step "
      "that is being recorded, and are done by `transport`: a ProcessGroupGloo on hosts, a "
      "ProcessGroupNCCL on GPUs.")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> transport,
                       c10::intrusive_ptr<c10d::Store> store) {
             return c10::make_intrusive<ProcessGroupACC>(std::move(transport), std::move(store));
           }),
           py::arg("transport"), py::arg("store"),
           py::call_guard<py::gil_scoped_release>())  // it opens a connection
      // As of torch's ProcessGroupNCCL; of other backends Python has no such name.
      .def("get_error", &ProcessGroupACC::getError, py::call_guard<py::gil_scoped_release>())
      .def("failure", &ProcessGroupACC::failure, py::call_guard<py::gil_scoped_release>(),
           "Why the group is of no more use; empty while it is.")
      .def_property_readonly("transport", &ProcessGroupACC::transport);
  m.def("wait_for_sends", guarded(&distributed::wait_for_sends),
        "Waits until the others have received what this process has sent and waited for, each "
        "group at most as long as its timeout. Raises what one failed with.");
  m.def(
      "seconds_to_hear",
      [] { return std::chrono::duration<double>(distributed::time_to_hear()).count(); },
      "Within how many seconds all ranks of this process's groups hear what one has failed with.");
  m.def(
      "tell_of_waits_after",
      [](double seconds) {
        distributed::tell_of_waits_after(
            std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
      },
      py::arg("seconds"),
      "For tests: after how long a send or barrier warns of the collective that it waits for.");
  return true;
}

}  // namespace acc::bindings
