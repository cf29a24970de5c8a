#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// Products of two matrices that do more in the same call, as cublasLt's epilogues do:
//
//   acc::addmm_activation(bias (n), a (m, k), b (k, n), use_gelu, with_aux)
//     -> (activated (m, n), aux or nothing)
//     relu(a @ b + bias), or gelu(a @ b + bias, "tanh"), and what their backward needs. For GELU
//     aux is its input, (m, n), n a multiple of 8. For ReLU it is a bit per element, set where the
//     input was neither negative nor zero: (m, n / 8) bytes, n a multiple of 128.
//   acc::mm_activation_backward(a (m, k), b (k, n), aux, use_gelu, bias_gradient)
//     -> (gradient (m, n), sum of its rows (n) or nothing)
//     The gradient of the activation's input, where a @ b is that of its result.
//   acc::mm_bias_gradient(a (m, k), b (k, n), left) -> (a @ b, sum)
//     The sum of the columns of a (`left`), or of the rows of b: that operand is the gradient of a
//     layer's result, and the product that of its weight.
//
// Here they are made of ATen's operators: on hosts, and where cublasLt has none.
namespace acc::library {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

TwoTensors addmm_activation(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
                            bool use_gelu, bool with_aux);
TwoTensors mm_activation_backward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& aux,
                                  bool use_gelu, bool bias_gradient);
TwoTensors mm_bias_gradient(const at::Tensor& a, const at::Tensor& b, bool left);

}  // namespace acc::library
