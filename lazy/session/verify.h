#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lazy/exec/runner.h"
#include "lazy/exec/verify.h"

// Steps that are compared with ATen while they run.
namespace acc::session {

// What became of the plans that the calling thread has submitted meanwhile.
struct VerifiedStep {
  size_t plans = 0;
  // Of each plan twice: as it runs, and made once more with every value kept, where each operator
  // can be told from those that it is fused with.
  exec::Verified as_planned;
  exec::Verified all_kept;
  std::vector<std::string> problems;  // plans that could not be compared: why
};

// From here on the calling thread's plans are verified. Throws where they are already.
void begin_verify();
VerifiedStep end_verify();

bool verifies();
// As exec::run.
exec::Outcome run_verified(plan::Plan& plan, c10::DeviceIndex device,
                           std::vector<exec::Given> given, std::span<const int64_t> values);

}  // namespace acc::session
