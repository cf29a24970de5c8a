#pragma once

namespace acc::aten {

// Teaches the recorder where ATen's CPU kernels give other shapes, types or strides than the Meta
// kernels promise, and what has to run at once.
void register_meta_rules();
void register_meta_refusals();  // the latter part of it

}  // namespace acc::aten
