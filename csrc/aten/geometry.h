#pragma once

#include <ATen/core/Tensor.h>

namespace acc::aten {

// A tensor of the backend's device with the geometry and type of `tensor` and no data: for asking
// ATen's own selection functions what they would choose. Undefined for undefined.
at::Tensor geometry_only(const at::Tensor& tensor);

}  // namespace acc::aten
