#pragma once

namespace acc::runtime {

// Registers how torch.autograd.profiler.profile(use_device="acc") takes times. Once per process.
void register_profiler();

}  // namespace acc::runtime
