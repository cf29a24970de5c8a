#pragma once

namespace acc::aten {

// Teaches the recorder the layouts that ATen's CPU kernels give where Meta kernels promise others.
void register_stride_rules();

}  // namespace acc::aten
