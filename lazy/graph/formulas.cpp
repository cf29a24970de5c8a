#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <map>
#include <mutex>
#include <string_view>

#include "csrc/base/check.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/formula.h"
#include "lazy/graph/words.h"

// The table of formulas, and which one a node has.
namespace acc::graph {
namespace {

struct Row {
  const char* op;     // for the forms that write too ("aten::add_.Tensor", "aten::add.out")
  const char* guard;  // "argument=value, ...": only for nodes with these values; "": for all
  const char* formula;
  const char* over = "";  // see Formula
  const char* along = "";
};

// Constants are those of ATen's kernels: 0.7071067811865476 = sqrt(1/2), 0.3989422804014327 =
// 1/sqrt(2 pi), 0.7978845608028654 = sqrt(2/pi), 0.044715 of the tanh approximation of GELU
// (Hendrycks & Gimpel, arXiv:1606.08415), 0.1666666716337204 = 1/6 in float32.
constexpr Row kRows[] = {
    {"aten::copy_", "", "src"},
    {"aten::_to_copy", "", "self"},
    {"aten::clone", "", "self"},
    {"aten::fill_.Scalar", "", "value"},
    {"aten::fill_.Tensor", "", "value"},
    {"aten::zero_", "", "0"},

    {"aten::add.Tensor", "", "fma(alpha, other, self)"},
    {"aten::add.Scalar", "", "fma(alpha, other, self)"},
    {"aten::sub.Tensor", "", "fma(-alpha, other, self)"},
    {"aten::sub.Scalar", "", "fma(-alpha, other, self)"},
    {"aten::rsub.Tensor", "", "fma(-alpha, self, other)"},
    {"aten::rsub.Scalar", "", "fma(-alpha, self, other)"},
    {"aten::mul.Tensor", "", "self * other"},
    {"aten::mul.Scalar", "", "self * other"},
    {"aten::div.Tensor", "", "self / other"},
    {"aten::div.Scalar", "", "self / other"},
    {"aten::addcmul", "", "fma(value * tensor1, tensor2, self)"},
    {"aten::addcdiv", "", "self + value * tensor1 / tensor2"},
    {"aten::lerp.Scalar", "",
     "fma(abs(weight) < 0.5 ? weight : weight - 1, end - self, abs(weight) < 0.5 ? self : end)"},
    {"aten::lerp.Tensor", "",
     "fma(abs(weight) < 0.5 ? weight : weight - 1, end - self, abs(weight) < 0.5 ? self : end)"},
    {"aten::neg", "", "-self"},
    {"aten::abs", "", "abs(self)"},
    {"aten::sign", "", "self > 0 ? 1 : (self < 0 ? -1 : 0)"},
    {"aten::reciprocal", "", "reciprocal(self)"},
    {"aten::sqrt", "", "sqrt(self)"},
    {"aten::rsqrt", "", "rsqrt(self)"},
    {"aten::pow.Tensor_Scalar", "exponent=0.5", "sqrt(self)"},
    {"aten::pow.Tensor_Scalar", "exponent=1", "self"},
    {"aten::pow.Tensor_Scalar", "exponent=2", "self * self"},
    {"aten::pow.Tensor_Scalar", "exponent=3", "self * self * self"},
    {"aten::pow.Tensor_Scalar", "exponent=-0.5", "rsqrt(self)"},
    {"aten::pow.Tensor_Scalar", "exponent=-1", "reciprocal(self)"},
    {"aten::pow.Tensor_Scalar", "exponent=-2", "reciprocal(self * self)"},
    {"aten::pow.Tensor_Scalar", "", "pow(self, exponent)"},
    {"aten::pow.Tensor_Tensor", "", "pow(self, exponent)"},
    {"aten::pow.Scalar", "", "pow(self, exponent)"},
    {"aten::maximum", "", "max(other, self)"},
    {"aten::minimum", "", "min(other, self)"},
    {"aten::clamp", "min=None", "max < self ? max : self"},
    {"aten::clamp", "max=None", "self < min ? min : self"},
    {"aten::clamp", "", "min(max(self, min), max)"},
    {"aten::clamp_min", "", "max(self, min)"},
    {"aten::clamp_max", "", "min(self, max)"},

    {"aten::eq.Tensor", "", "self == other"},
    {"aten::eq.Scalar", "", "self == other"},
    {"aten::ne.Tensor", "", "self != other"},
    {"aten::ne.Scalar", "", "self != other"},
    {"aten::lt.Tensor", "", "self < other"},
    {"aten::lt.Scalar", "", "self < other"},
    {"aten::le.Tensor", "", "self <= other"},
    {"aten::le.Scalar", "", "self <= other"},
    {"aten::gt.Tensor", "", "self > other"},
    {"aten::gt.Scalar", "", "self > other"},
    {"aten::ge.Tensor", "", "self >= other"},
    {"aten::ge.Scalar", "", "self >= other"},
    {"aten::logical_not", "", "self == 0"},
    {"aten::logical_and", "", "(self != 0) & (other != 0)"},
    {"aten::logical_or", "", "(self != 0) | (other != 0)"},
    {"aten::logical_xor", "", "(self != 0) ^ (other != 0)"},
    {"aten::bitwise_not", "", "!self"},
    {"aten::bitwise_and.Tensor", "", "self & other"},
    {"aten::bitwise_or.Tensor", "", "self | other"},
    {"aten::bitwise_xor.Tensor", "", "self ^ other"},
    {"aten::where.self", "", "condition ? self : other"},
    {"acc::where_", "", "condition ? self : other"},
    {"aten::masked_fill.Scalar", "", "mask ? value : self"},
    {"aten::masked_fill.Tensor", "", "mask ? value : self"},

    {"aten::exp", "", "exp(self)"},
    {"aten::exp2", "", "exp2(self)"},
    {"aten::expm1", "", "expm1(self)"},
    {"aten::log", "", "log(self)"},
    {"aten::log2", "", "log2(self)"},
    {"aten::log10", "", "log10(self)"},
    {"aten::log1p", "", "log1p(self)"},
    {"aten::sin", "", "sin(self)"},
    {"aten::cos", "", "cos(self)"},
    {"aten::tan", "", "tan(self)"},
    {"aten::asin", "", "asin(self)"},
    {"aten::acos", "", "acos(self)"},
    {"aten::atan", "", "atan(self)"},
    {"aten::sinh", "", "sinh(self)"},
    {"aten::cosh", "", "cosh(self)"},
    {"aten::erf", "", "erf(self)"},
    {"aten::erfc", "", "erfc(self)"},
    {"aten::floor", "", "floor(self)"},
    {"aten::ceil", "", "ceil(self)"},
    {"aten::trunc", "", "trunc(self)"},
    {"aten::round", "", "round(self)"},

    {"aten::relu", "", "self < 0 ? 0 : self"},
    {"aten::threshold", "", "self <= threshold ? value : self"},
    {"aten::threshold_backward", "", "self <= threshold ? 0 : grad_output"},
    {"aten::tanh", "", "tanh(self)"},
    {"aten::tanh_backward", "", "grad_output * fma(-output, output, 1)"},
    {"aten::sigmoid", "", "sigmoid(self)"},
    {"aten::sigmoid_backward", "", "grad_output * (1 - output) * output"},
    {"aten::silu", "", "self / (1 + exp(-self))"},
    {"aten::silu_backward", "", "grad_output * sigmoid(self) * fma(self, 1 - sigmoid(self), 1)"},
    {"aten::gelu", "approximate=none", "self * 0.5 * (1 + erf(self * 0.7071067811865476))"},
    {"aten::gelu", "approximate=tanh",
     "0.5 * self * (1 + tanh(0.7978845608028654 * (self + 0.044715 * (self * self * self))))"},
    {"aten::gelu_backward", "approximate=none",
     "grad_output * fma(self, 0.3989422804014327 * exp(self * self * -0.5), "
     "0.5 * (1 + erf(self * 0.7071067811865476)))"},
    {"aten::gelu_backward", "approximate=tanh",
     "t = tanh(0.7978845608028654 * (self + 0.044715 * (self * self * self))); "
     "grad_output * (0.5 * (1 + t) + 0.5 * self * (1 - t * t) * "
     "(0.7978845608028654 * (1 + 0.134145 * (self * self))))"},
    {"aten::leaky_relu", "", "self > 0 ? self : self * negative_slope"},
    {"aten::leaky_relu_backward", "", "self > 0 ? grad_output : grad_output * negative_slope"},
    {"aten::elu", "", "self < 0 ? expm1(self * input_scale) * (alpha * scale) : self * scale"},
    {"aten::elu_backward", "is_result=False",
     "self_or_result > 0 ? grad_output * scale : "
     "grad_output * input_scale * (alpha * scale) * exp(self_or_result * input_scale)"},
    {"aten::elu_backward", "is_result=True",
     "self_or_result > 0 ? grad_output * scale : "
     "grad_output * input_scale * (self_or_result + alpha * scale)"},
    {"aten::hardtanh_backward", "", "(self > min_val) & (self < max_val) ? grad_output : 0"},
    {"aten::softplus", "", "self * beta > threshold ? self : log1p(exp(self * beta)) / beta"},
    {"aten::softplus_backward", "",
     "self * beta > threshold ? grad_output : "
     "grad_output * exp(self * beta) / (exp(self * beta) + 1)"},
    {"aten::hardswish", "", "self * min(max(self + 3, 0), 6) / 6"},
    {"aten::hardswish_backward", "",
     "self <= -3 ? 0 : (self >= 3 ? grad_output : grad_output * (self / 3 + 0.5))"},
    {"aten::hardsigmoid", "", "min(max(self + 3, 0), 6) / 6"},
    {"aten::hardsigmoid_backward", "",
     "(self > -3) & (self < 3) ? grad_output * 0.1666666716337204 : 0"},
    {"aten::mish", "", "self * tanh(log1p(exp(self)))"},
    {"aten::mish_backward", "",
     "t = tanh(log1p(exp(self))); "
     "grad_output * (t + self * sigmoid(self) * (1 - t * t))"},
    {"aten::smooth_l1_loss_backward", "reduction=1",
     "d = self - target; d <= -beta ? -1 / count * grad_output : "
     "(d >= beta ? 1 / count * grad_output : 1 / count * d * grad_output / beta)"},
    {"aten::smooth_l1_loss_backward", "",
     "d = self - target; d <= -beta ? -grad_output : "
     "(d >= beta ? grad_output : d * grad_output / beta)"},
    {"aten::huber_loss_backward", "reduction=1",
     "d = self - target; d <= -delta ? -1 / count * grad_output * delta : "
     "(d >= delta ? 1 / count * grad_output * delta : 1 / count * d * grad_output)"},
    {"aten::huber_loss_backward", "",
     "d = self - target; d <= -delta ? -grad_output * delta : "
     "(d >= delta ? grad_output * delta : d * grad_output)"},
    {"aten::mse_loss_backward", "reduction=1", "2 / count * (self - target) * grad_output"},
    {"aten::mse_loss_backward", "", "2 * (self - target) * grad_output"},
    {"acc::native_dropout", "",
     "kept = drawn(seed, offset, below); input * (kept ? 1 : 0) * scale, kept"},
    {"acc::bernoulli_", "", "drawn(seed, offset, below) ? 1 : 0"},
    {"acc::uniform_", "", "x = uniform(seed, offset) * (to - from) + from; x < to ? x : from"},
    {"acc::normal_", "", "normal(seed, offset) * std + mean"},
    {"acc::random_", "", "integer(seed, offset, count) + from"},
    {"acc::exponential_", "", "exponential(seed, offset) / lambd"},
    {"aten::native_dropout_backward", "", "grad_output * (mask ? scale : 0)"},

    {"aten::sum", "", "sum(self)", "*"},
    {"aten::sum.dim_IntList", "", "sum(self)", "dim"},
    {"aten::mean", "", "sum(self) / count", "*"},
    {"aten::mean.dim", "", "sum(self) / count", "dim"},
    {"aten::amax", "", "amax(self)", "dim"},
    {"aten::amin", "", "amin(self)", "dim"},
    {"aten::linalg_vector_norm", "ord=2", "sqrt(sum(self * self))", "dim"},
    {"aten::mse_loss", "reduction=1", "d = self - target; sum(d * d) / count", "*"},
    {"aten::mse_loss", "reduction=2", "d = self - target; sum(d * d)", "*"},
    {"aten::smooth_l1_loss", "reduction=0",
     "z = abs(self - target); z < beta ? 0.5 * z * z / beta : z - 0.5 * beta"},
    {"aten::smooth_l1_loss", "reduction=1",
     "z = abs(self - target); sum(z < beta ? 0.5 * z * z / beta : z - 0.5 * beta) / count", "*"},
    {"aten::smooth_l1_loss", "reduction=2",
     "z = abs(self - target); sum(z < beta ? 0.5 * z * z / beta : z - 0.5 * beta)", "*"},
    {"aten::huber_loss", "reduction=0",
     "z = abs(self - target); z < delta ? 0.5 * z * z : delta * (z - 0.5 * delta)"},
    {"aten::huber_loss", "reduction=1",
     "z = abs(self - target); sum(z < delta ? 0.5 * z * z : delta * (z - 0.5 * delta)) / count",
     "*"},
    {"aten::huber_loss", "reduction=2",
     "z = abs(self - target); sum(z < delta ? 0.5 * z * z : delta * (z - 0.5 * delta))", "*"},

    {"aten::_softmax", "", "e = exp(self - amax(self)); e / sum(e)", "dim"},
    {"aten::_softmax_backward_data", "", "output * (grad_output - sum(grad_output * output))",
     "dim"},
    {"aten::_log_softmax", "", "d = self - amax(self); d - log(sum(exp(d)))", "dim"},
    {"aten::_log_softmax_backward_data", "", "grad_output - exp(output) * sum(grad_output)", "dim"},

    {"aten::native_layer_norm", "weight=None, bias=None",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "d * r, mean, r",
     "last normalized_shape"},
    {"aten::native_layer_norm", "bias=None",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "d * r * weight, mean, r",
     "last normalized_shape"},
    {"aten::native_layer_norm", "",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "fma(d * r, weight, bias), mean, r",
     "last normalized_shape"},

    {"aten::native_layer_norm_backward", "output_mask=100, weight=None",
     "x = (input - mean) * rstd; g = grad_out; "
     "(g - fma(x, sum(g * x), sum(g)) / count) * rstd",
     "last normalized_shape"},
    {"aten::native_layer_norm_backward", "output_mask=100",
     "x = (input - mean) * rstd; g = grad_out * weight; "
     "(g - fma(x, sum(g * x), sum(g)) / count) * rstd",
     "last normalized_shape"},
    {"aten::native_layer_norm_backward", "output_mask=011",
     "sum(grad_out * ((input - mean) * rstd)), sum(grad_out)", "before last normalized_shape"},
    {"aten::native_layer_norm_backward", "output_mask=010",
     "sum(grad_out * ((input - mean) * rstd))", "before last normalized_shape"},

    {"aten::native_batch_norm", "training=False, weight=None, bias=None",
     "(input - running_mean) * rsqrt(running_var + eps)", "", "1"},
    {"aten::native_batch_norm", "training=False",
     "fma(input - running_mean, rsqrt(running_var + eps) * weight, bias)", "", "1"},
    {"aten::native_batch_norm", "training=True, weight=None, bias=None, running_mean=None",
     "mean = sum(input) / count; d = input - mean; v = sum(d * d) / count + eps; "
     "r = v == 0 ? 0 : rsqrt(v); "
     "d * r, mean, r",
     "but 1", "1"},
    {"aten::native_batch_norm", "training=True, running_mean=None",
     "mean = sum(input) / count; d = input - mean; v = sum(d * d) / count + eps; "
     "r = v == 0 ? 0 : rsqrt(v); "
     "fma(d, r * weight, bias), mean, r",
     "but 1", "1"},
    {"aten::native_batch_norm", "training=True, weight=None, bias=None",
     "mean = sum(input) / count; d = input - mean; v = sum(d * d); "
     "u = v / count + eps; r = u == 0 ? 0 : rsqrt(u); "
     "running_mean = fma(momentum, mean, (1 - momentum) * running_mean); "
     "running_var = fma(momentum, v / (count - 1), (1 - momentum) * running_var); "
     "d * r, mean, r",
     "but 1", "1"},
    {"aten::native_batch_norm", "training=True",
     "mean = sum(input) / count; d = input - mean; v = sum(d * d); "
     "u = v / count + eps; r = u == 0 ? 0 : rsqrt(u); "
     "running_mean = fma(momentum, mean, (1 - momentum) * running_mean); "
     "running_var = fma(momentum, v / (count - 1), (1 - momentum) * running_var); "
     "fma(d, r * weight, bias), mean, r",
     "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=True, output_mask=100, weight=None",
     "x = (input - save_mean) * save_invstd; "
     "(grad_out - fma(x, sum(grad_out * x), sum(grad_out)) / count) * save_invstd",
     "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=True, output_mask=100",
     "x = (input - save_mean) * save_invstd; "
     "(grad_out - fma(x, sum(grad_out * x), sum(grad_out)) / count) * (save_invstd * weight)",
     "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=True, output_mask=011",
     "sum(grad_out * ((input - save_mean) * save_invstd)), sum(grad_out)", "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=True, output_mask=111, weight=None",
     "x = (input - save_mean) * save_invstd; w = sum(grad_out * x); b = sum(grad_out); "
     "(grad_out - fma(x, w, b) / count) * save_invstd, w, b",
     "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=True, output_mask=111",
     "x = (input - save_mean) * save_invstd; w = sum(grad_out * x); b = sum(grad_out); "
     "(grad_out - fma(x, w, b) / count) * (save_invstd * weight), w, b",
     "but 1", "1"},
    {"aten::native_batch_norm_backward", "train=False, output_mask=100, weight=None",
     "grad_out * rsqrt(running_var + eps)", "", "1"},
    {"aten::native_batch_norm_backward", "train=False, output_mask=100",
     "grad_out * (rsqrt(running_var + eps) * weight)", "", "1"},
    {"aten::native_batch_norm_backward", "train=False, output_mask=011",
     "sum(grad_out * (input - running_mean)) * rsqrt(running_var + eps), sum(grad_out)", "but 1",
     "1"},
    {"aten::native_batch_norm_backward", "train=False, output_mask=111",
     "r = rsqrt(running_var + eps); "
     "grad_out * (r * weight), sum(grad_out * (input - running_mean)) * r, sum(grad_out)",
     "but 1", "1"},

    {"aten::native_group_norm", "weight=None, bias=None",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "d * r, mean, r",
     "group", "group"},
    {"aten::native_group_norm", "bias=None",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "d * r * weight, mean, r",
     "group", "group"},
    {"aten::native_group_norm", "",
     "mean = sum(input) / count; d = input - mean; r = rsqrt(sum(d * d) / count + eps); "
     "fma(d * r, weight, bias), mean, r",
     "group", "group"},
    {"aten::native_group_norm_backward", "output_mask=100, weight=None",
     "x = (input - mean) * rstd; g = grad_out; "
     "(g - fma(x, sum(g * x), sum(g)) / count) * rstd",
     "group", "group"},
    {"aten::native_group_norm_backward", "output_mask=100",
     "x = (input - mean) * rstd; g = grad_out * weight; "
     "(g - fma(x, sum(g * x), sum(g)) / count) * rstd",
     "group", "group"},
    {"aten::native_group_norm_backward", "output_mask=011",
     "sum(grad_out * ((input - mean) * rstd)), sum(grad_out)", "but group", "group"},
    {"aten::native_group_norm_backward", "output_mask=010",
     "sum(grad_out * ((input - mean) * rstd))", "but group", "group"},

    // nll_loss_forward, which has to run before, reports targets that are no class.
    {"aten::nll_loss_backward", "weight=None, reduction=1",
     "(position == target) & (target != ignore_index) ? -grad_output / total_weight : 0", "",
     "but 1"},
    {"aten::nll_loss_backward", "weight=None",
     "(position == target) & (target != ignore_index) ? -grad_output : 0", "", "but 1"},
    {"aten::nll_loss2d_backward", "weight=None, reduction=1",
     "(position == target) & (target != ignore_index) ? -grad_output / total_weight : 0", "",
     "but 1"},
    {"aten::nll_loss2d_backward", "weight=None",
     "(position == target) & (target != ignore_index) ? -grad_output : 0", "", "but 1"},
};

// Operators that convert: each argument is taken in its own type.
bool converts(std::string_view op) {
  return op == "aten::copy_" || op == "aten::_to_copy" || op == "aten::clone";
}

struct Guard {
  size_t argument;
  std::string value;
};

struct Guarded {
  std::vector<Guard> guards;
  Formula formula;
};

// The names under which the formula of an operator may stand: its own; that of its functional form
// for those that write ("aten::add.Tensor" for "aten::add_.Tensor" and "aten::add.out").
std::vector<std::string> names_of(const std::string& name) {
  const size_t dot = std::min(name.find('.'), name.size());
  const std::string base = name.substr(0, dot);
  const std::string overload = name.substr(dot);
  // ATen names what pow_ takes after the exponent alone.
  if (base == "aten::pow_") return {"aten::pow.Tensor_" + overload.substr(1)};
  if (base.ends_with('_')) return {name, base.substr(0, dot - 1) + overload};
  if (overload == ".out") return {base, base + ".Tensor"};
  if (overload.ends_with("_out")) return {base + overload.substr(0, overload.size() - 4)};
  return {name};
}

Guard parse_guard(const Op& op, std::string_view text) {
  const size_t equals = text.find('=');
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (op.arguments[i].name == text.substr(0, equals)) {
      return {i, std::string(text.substr(equals + 1))};
    }
  }
  ACC_CHECK(false, "[formula] ", op.name, " has no argument for the guard '", text,
            "'. Correct the table.");
  __builtin_unreachable();
}

std::vector<Guarded> parse_rows(const Op& op, std::string_view name) {
  std::vector<std::string> names;
  names.reserve(op.arguments.size());
  for (const Argument& argument : op.arguments) names.push_back(argument.name);
  std::vector<Guarded> rows;
  for (const Row& row : kRows) {
    if (name != row.op) continue;
    Guarded& made = rows.emplace_back();
    made.formula = parse_formula(row.formula, names);
    made.formula.converts = converts(name);
    made.formula.over = row.over;
    made.formula.along = row.along;
    for (std::string_view rest = row.guard; !rest.empty();) {
      const size_t end = std::min(rest.find(", "), rest.size());
      made.guards.push_back(parse_guard(op, rest.substr(0, end)));
      rest.remove_prefix(std::min(end + 2, rest.size()));
    }
  }
  return rows;
}

// Whether the item at `word` is the value that a guard names. Numbers have to be structure; a list
// of truths is a digit each.
bool has_value(const int64_t* word, const std::string& value) {
  const bool slot = (flags_of(*word) & kValueFlag) != 0;
  switch (tag_of(*word)) {
    case Tag::kNone:
    case Tag::kUndefined:
      return value == "None";
    case Tag::kBool:
      return !slot && value == (word[1] != 0 ? "True" : "False");
    case Tag::kList: {
      std::string digits;
      for (const int64_t* item : items({word + 1, item_words(word) - 1})) {
        if (tag_of(*item) != Tag::kBool || (flags_of(*item) & kValueFlag) != 0) return false;
        digits += item[1] != 0 ? '1' : '0';
      }
      return digits == value;
    }
    case Tag::kString:
      return value == std::string_view(reinterpret_cast<const char*>(word + 1), count_of(*word));
    case Tag::kInt:
    case Tag::kFloat: {
      if (slot) return false;
      double number = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
      if (error != std::errc() || end != value.data() + value.size()) return false;
      return number == (tag_of(*word) == Tag::kInt ? static_cast<double>(word[1])
                                                   : std::bit_cast<double>(word[1]));
    }
    default:
      return false;
  }
}

}  // namespace

const Formula* formula_of(const Graph& graph, const Node& node) {
  // Plans are built under the mutex of a device, and there are several devices.
  static std::mutex mutex;
  static auto& parsed = *new std::map<std::string, std::vector<Guarded>>;
  const std::lock_guard lock(mutex);
  auto found = parsed.find(node.op->name);
  if (found == parsed.end()) {
    std::vector<Guarded> rows;
    for (const std::string& name : names_of(node.op->name)) {
      if (rows.empty()) rows = parse_rows(*node.op, name);
    }
    found = parsed.emplace(node.op->name, std::move(rows)).first;
  }
  if (found->second.empty()) return nullptr;
  const std::vector<const int64_t*> arguments = items(graph.arguments(node));
  for (const Guarded& row : found->second) {
    const bool fits = std::ranges::all_of(row.guards, [&](const Guard& guard) {
      return has_value(arguments[guard.argument], guard.value);
    });
    if (fits) return &row.formula;
  }
  return nullptr;
}

std::vector<std::string> operators_with_formulas() {
  std::vector<std::string> names;
  for (const Row& row : kRows) {
    if (names.empty() || names.back() != row.op) names.emplace_back(row.op);
  }
  return names;
}

}  // namespace acc::graph
