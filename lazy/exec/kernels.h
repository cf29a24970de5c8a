#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/codegen/render.h"
#include "lazy/exec/missed_kernel.h"
#include "lazy/plan/plan.h"

// Generated kernels of a plan: made while its first run goes on without them, called from the
// second.
namespace acc::exec {

// The schedule that the next run of the plan goes by. As soon as the plan repeats its kernels are
// requested; the run after that waits for them, within limits, and what could be made is fused from
// then on. In the next few runs the kernels are compared with what they replace (see
// lazy/plan/trial.h), and those that are slower are put aside, once, with a warning.
//
// On a GPU a plan that draws many random numbers waits from its first run on, as long as it takes,
// and kernels that draw are not compared: operators draw on the host, and copy.
//
// Where bits must not depend on time (ACC_DETERMINISTIC, deterministic algorithms, several
// processes that train together) a plan waits as long as it takes, and all kernels stay.
plan::Schedule& choose_schedule(plan::Plan& plan, c10::DeviceIndex device);

// The schedule with all kernels that can be made, which are waited for; the one without where there
// are none.
plan::Schedule& await_fused(plan::Plan& plan, c10::DeviceIndex device);

// The name of a kernel of the plan.
std::string kernel_name(const plan::Plan& plan, uint32_t kernel);

// Whether all runs of the plan from now on go by this schedule, as far as can be told.
bool is_settled(const plan::Plan& plan, const plan::Schedule& schedule);

// Whether the plan is as it will stay, and may be compared with another form of it: it repeats, its
// kernels are chosen, and nothing asks for bits that do not depend on time.
bool may_be_compared(plan::Plan& plan);

// Why this process has no generated kernels; "" where it makes some. May start the compiler.
std::string kernels_problem();

// The kernels that this process has done without, but for the first `from`.
std::vector<MissedKernel> missed_kernels(size_t from);

// Whether this process has used the kernel of that name whenever it needed it.
bool relies_on_kernel(const std::string& name);

// All plans are made anew, and need their kernels anew.
void forget_needed_kernels();

// Whether plans are made for GPUs: their kernels take large reductions in parts, and products have
// epilogues.
bool for_gpus();

// The text of a kernel of the plan for a GPU.
codegen::KernelText gpu_text(const plan::Plan& plan, uint32_t kernel);

// What became of a kernel of the plan, for make_kernel_call. Only for those that steps call.
void* function_of(const plan::Plan& plan, uint32_t kernel);

}  // namespace acc::exec
