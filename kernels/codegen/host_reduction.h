#pragma once

#include "kernels/codegen/render.h"

namespace acc::codegen {

// The text of a kernel that has reduced loops.
KernelText render_host_reduction(const KernelSpec& kernel);

}  // namespace acc::codegen
