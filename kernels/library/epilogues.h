#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// Products of matrices together with what stands behind them: acc::addmm_gelu,
// acc::mm_gelu_backward, acc::mm_and_sum. Here as ATen's operators, one after the other: what they
// are on the host, and on a GPU where its library cannot do them at once or does them slower.
// lazy/passes/epilogues.h makes the calls.
namespace acc::library {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// Throw where what a call of these operators was given does not go together: programs may call
// them too, and what reads the memory on a GPU asks nothing.
void check_product(const char* name, const at::Tensor& left, const at::Tensor& right);
void check_bias(const at::Tensor& bias, const at::Tensor& right);
void check_before(const at::Tensor& before, const at::Tensor& left, const at::Tensor& right);

// (n), (R, k), (k, n): the GELU (tanh) of bias + left @ right, and what it is the GELU of, (R, n).
TwoTensors addmm_gelu(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right);

// (R, k), (k, n), (R, n): the gradient of what the GELU (tanh) was taken of, `before`, where that
// of its result is left @ right; (R, n).
at::Tensor mm_gelu_backward(const at::Tensor& left, const at::Tensor& right,
                            const at::Tensor& before);

// (m, k), (k, n): left @ right, (m, n), and the sum of the columns of left, (m), or (1, m) with
// `keepdim`: left is a transposed matrix, whose first dimension is the one that vanishes.
TwoTensors mm_and_sum(const at::Tensor& left, const at::Tensor& right, bool keepdim);

}  // namespace acc::library
