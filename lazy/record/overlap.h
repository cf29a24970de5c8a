#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

namespace acc::record {

// How the elements of two tensors of one storage share memory. ATen tells it of dense tensors; also
// known here is it of what slices and selections of one tensor are, as in `boxes[:, 2:] -=
// boxes[:, :2]`: strided alike, side by side. TooHard where it is known in neither way.
at::MemOverlapStatus overlap_status(const at::Tensor& a, const at::Tensor& b);

}  // namespace acc::record
