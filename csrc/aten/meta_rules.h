#pragma once

namespace acc::aten {

// Teaches the recorder where ATen's CPU kernels give other shapes or strides than the Meta kernels
// promise, and what they refuse that Meta kernels accept.
void register_meta_rules();

}  // namespace acc::aten
