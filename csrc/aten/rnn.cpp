#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <vector>

#include "csrc/aten/rnn_cells.h"
#include "csrc/aten/rnn_cudnn.h"
#include "lazy/session/session.h"

// Recurrent layers as the CPU runs them: LSTM through oneDNN's fused layer where that can, the rest
// step by step after one product of all inputs. ATen takes these ways for CPU tensors only. These
// kernels stand above autograd and call differentiable operators only, so gradients come by
// themselves. On a GPU most are cuDNN's (rnn_cudnn.h), and the rest goes step by step: ATen's way
// there is an operator for each cell, which for a GRU has no Meta kernel and would run at once, and
// which our kernels cannot be joined with.
namespace acc::aten {
namespace {

// oneDNN's numbering of the kinds of recurrent layers.
constexpr int64_t kOneDnnLstm = 2;

// A stack of layers, as the arguments of the operators describe it.
struct Stack {
  RnnKind kind;
  at::TensorList params;
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train;
  bool bidirectional;

  int64_t directions() const { return bidirectional ? 2 : 1; }
  int64_t runs() const { return num_layers * directions(); }

  RnnWeights weights(size_t index) const {
    const size_t each = params.size() / static_cast<size_t>(runs());
    const auto own = params.slice(index * each, each);
    RnnWeights made{own[0], own[1], {}, {}, {}};
    if (has_biases) {
      made.b_ih = own[2];
      made.b_hh = own[3];
    }
    if (each % 2 == 1) made.w_hr = own.back();
    return made;
  }

  // Throws for too few or too many parameters, and for what does not fit them.
  // h, c: [num_layers * directions, batch, hidden]
  void check(int64_t batch, int64_t features, const at::Tensor& h, const at::Tensor& c) const {
    const auto given = static_cast<int64_t>(params.size());
    const int64_t least = runs() * (has_biases ? 4 : 2);
    // A projection is one weight more.
    TORCH_CHECK(runs() > 0 && (given == least || given == least + runs()),
                "got an incorrect number of RNN parameters: ", given, " for ", num_layers,
                " layers in ", directions(), " directions");
    TORCH_CHECK(h.size(0) == runs() && (!c.defined() || c.size(0) == runs()),
                "Expected hidden states for ", runs(), " layers and directions, got ", h.sizes(),
                c.defined() ? " and " : "", c.defined() ? c.sizes() : at::IntArrayRef());
    for (int64_t run = 0; run < runs(); ++run) {
      const int64_t width = run < directions() ? features : directions() * h.size(2);
      rnn_check(kind, batch, width, {h, c}, weights(static_cast<size_t>(run)));
    }
  }
};

// One layer in one direction: all outputs in the order of the inputs, and the last state.
struct Run {
  at::Tensor output;
  RnnState last;
};
using RunDirection = std::function<Run(const at::Tensor& input, const RnnState& first,
                                       const RnnWeights& weights, bool backwards)>;

struct Outcome {
  at::Tensor output;
  at::Tensor h;
  at::Tensor c;  // undefined unless the states have one
};

// Layer by layer, direction by direction; outputs of the directions side by side.
// h, c: [num_layers * directions, batch, hidden]
Outcome run_stack(const Stack& stack, at::Tensor x, const at::Tensor& h, const at::Tensor& c,
                  const RunDirection& run) {
  const auto first_h = h.unbind(0);
  const auto first_c = c.defined() ? c.unbind(0) : std::vector<at::Tensor>(first_h.size());
  std::vector<at::Tensor> last_h;
  std::vector<at::Tensor> last_c;
  size_t index = 0;
  for (int64_t layer = 0; layer < stack.num_layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (int64_t direction = 0; direction < stack.directions(); ++direction, ++index) {
      Run done = run(x, {first_h[index], first_c[index]}, stack.weights(index), direction > 0);
      outputs.push_back(std::move(done.output));
      last_h.push_back(std::move(done.last.h));
      last_c.push_back(std::move(done.last.c));
    }
    x = outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1);
    if (stack.dropout != 0 && stack.train && layer + 1 < stack.num_layers) {
      x = at::dropout(x, stack.dropout, true);
    }
  }
  return {x, at::stack(last_h), c.defined() ? at::stack(last_c) : at::Tensor()};
}

// ---- one direction, in three ways --------------------------------------------------------------

// input: [steps, batch, features]
RunDirection over_steps(RnnKind kind) {
  return [kind](const at::Tensor& input, const RnnState& first, const RnnWeights& weights,
                bool backwards) -> Run {
    auto gates = rnn_input_gates(input, weights).unbind(0);
    if (backwards) std::ranges::reverse(gates);
    RnnState state = first;
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& step : gates) {
      state = rnn_step(kind, step, state, weights);
      outputs.push_back(state.h);
    }
    if (backwards) std::ranges::reverse(outputs);
    return {at::stack(outputs), state};
  };
}

RnnState rows(const RnnState& state, int64_t begin, int64_t end) {
  return {state.h.narrow(0, begin, end - begin),
          state.c.defined() ? state.c.narrow(0, begin, end - begin) : at::Tensor()};
}

RnnState join(const std::vector<RnnState>& states) {
  std::vector<at::Tensor> h;
  std::vector<at::Tensor> c;
  for (const RnnState& state : states) {
    h.push_back(state.h);
    c.push_back(state.c);
  }
  return {at::cat(h), states[0].c.defined() ? at::cat(c) : at::Tensor()};
}

// input: [sum of sizes, features], step after step; `sizes`, which never grow, are the sequences
// that still run in each step. Forwards, states leave from the end as sequences do; backwards they
// join.
RunDirection over_packed(RnnKind kind, std::vector<int64_t> sizes) {
  return [kind, sizes = std::move(sizes)](const at::Tensor& input, const RnnState& first,
                                          const RnnWeights& weights, bool backwards) -> Run {
    const at::Tensor gates = rnn_input_gates(input, weights);
    std::vector<at::Tensor> outputs;
    if (backwards) {
      int64_t end = gates.size(0);
      RnnState state = rows(first, 0, sizes.back());
      int64_t running = sizes.back();
      for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
        if (*size > running) state = join({state, rows(first, running, *size)});
        running = *size;
        state = rnn_step(kind, gates.narrow(0, end - *size, *size), state, weights);
        end -= *size;
        outputs.push_back(state.h);
      }
      std::ranges::reverse(outputs);
      return {at::cat(outputs), state};
    }
    int64_t begin = 0;
    RnnState state = first;
    int64_t running = sizes.front();
    std::vector<RnnState> ended;
    for (const int64_t size : sizes) {
      if (size < running) {
        ended.push_back(rows(state, size, running));
        state = rows(state, 0, size);
      }
      running = size;
      state = rnn_step(kind, gates.narrow(0, begin, size), state, weights);
      begin += size;
      outputs.push_back(state.h);
    }
    ended.push_back(state);
    std::ranges::reverse(ended);
    return {at::cat(outputs), join(ended)};
  };
}

// Whether the machine has what oneDNN needs for a type; `name` is PyTorch's operator that tells.
bool onednn_says(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<bool()>().call();
}

bool onednn_has_lstm(c10::ScalarType type) {
  if (!at::globalContext().userEnabledMkldnn() || !at::globalContext().hasMKLDNN()) return false;
  if (type == c10::kFloat) return true;
  if (type == c10::kBFloat16) return onednn_says("mkldnn::_is_mkldnn_bf16_supported");
  return type == c10::kHalf && !at::GradMode::is_enabled() &&
         onednn_says("mkldnn::_is_mkldnn_fp16_supported");
}

bool fused_lstm(const at::Tensor& input, at::TensorList hx, at::TensorList params,
                bool has_biases) {
  const c10::ScalarType type = input.scalar_type();
  if (session::for_gpus() || input.numel() == 0 || !onednn_has_lstm(type)) return false;
  // With projections a layer has one weight more, which oneDNN's layer does not take.
  if (hx[0].size(2) != hx[1].size(2)) return false;
  return params.size() % (has_biases ? 4 : 2) == 0 &&
         std::ranges::all_of(
             params, [type](const at::Tensor& tensor) { return tensor.scalar_type() == type; });
}

// input: [steps, batch, features]
RunDirection over_fused_lstm(const Stack& stack, bool batch_first) {
  return [&stack, batch_first](const at::Tensor& input, const RnnState& first,
                               const RnnWeights& weights, bool backwards) -> Run {
    const auto bias = [&](const at::Tensor& given, const at::Tensor& weight) {
      return given.defined() ? given : at::zeros({weight.size(0)}, weight.options());
    };
    auto [y, h, c, workspace] =
        at::mkldnn_rnn_layer(input, weights.w_ih, weights.w_hh, bias(weights.b_ih, weights.w_ih),
                             bias(weights.b_hh, weights.w_hh), first.h, first.c, backwards,
                             /*batch_sizes=*/{}, kOneDnnLstm, first.h.size(-1), stack.num_layers,
                             stack.has_biases, stack.bidirectional, batch_first, stack.train);
    return {y, {h, c}};
  };
}

// Under autocast a layer computes in the lower precision as a whole, states included, as cuDNN's
// do.
at::Tensor lowered(const at::Tensor& tensor) {
  constexpr c10::DeviceType kDevice = c10::kPrivateUse1;
  if (!at::autocast::is_autocast_enabled(kDevice)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), tensor, kDevice);
}

std::vector<at::Tensor> lowered(at::TensorList tensors) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& tensor : tensors) made.push_back(lowered(tensor));
  return made;
}

std::vector<int64_t> sizes_of(const at::Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.device().is_cpu() && batch_sizes.scalar_type() == c10::kLong &&
                  batch_sizes.dim() == 1 && batch_sizes.numel() > 0,
              "batch_sizes of a packed sequence must be a non-empty 1D CPU int64 tensor");
  const at::Tensor plain = batch_sizes.contiguous();
  const auto* sizes = plain.const_data_ptr<int64_t>();
  return {sizes, sizes + plain.numel()};
}

// What runs a layer is chosen by what it has and by the device: steps are [steps, batch, features].
Outcome run_padded(const Stack& stack, const at::Tensor& steps, const at::Tensor& h,
                   const at::Tensor& c) {
  stack.check(steps.size(1), steps.size(2), h, c);
  if (stack.dropout == 0 || !stack.train || stack.num_layers == 1) {
    std::vector<RnnWeights> weights;
    for (int64_t run = 0; run < stack.runs(); ++run) {
      weights.push_back(stack.weights(static_cast<size_t>(run)));
    }
    const RnnLayers layers{stack.kind, stack.num_layers, stack.bidirectional, stack.train};
    if (auto done = cudnn_layers(layers, steps, h, c, weights)) {
      auto& [output, last_h, last_c] = *done;
      return {output, last_h, last_c};
    }
  }
  return run_stack(stack, steps, h, c, over_steps(stack.kind));
}

Outcome run_packed(const Stack& stack, const at::Tensor& data, const at::Tensor& batch_sizes,
                   const at::Tensor& h, const at::Tensor& c) {
  const std::vector<int64_t> sizes = sizes_of(batch_sizes);
  stack.check(sizes.front(), data.size(1), h, c);
  return run_stack(stack, data, h, c, over_packed(stack.kind, sizes));
}

// ---- the operators -----------------------------------------------------------------------------

at::Tensor steps_first(const at::Tensor& input, bool batch_first) {
  const at::Tensor steps = batch_first ? input.transpose(0, 1) : input;
  TORCH_CHECK(steps.size(0) > 0, "Expected sequence length to be larger than 0 in RNN");
  return steps;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList hx,
                                                    at::TensorList params, bool has_biases,
                                                    int64_t num_layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  const at::Tensor x = lowered(input);
  const std::vector<at::Tensor> first = lowered(hx);
  const std::vector<at::Tensor> weights = lowered(params);
  const Stack stack{RnnKind::kLstm, weights, has_biases, num_layers, dropout, train, bidirectional};
  const at::Tensor steps = steps_first(x, batch_first);
  if (!fused_lstm(x, first, weights, has_biases)) {
    const Outcome done = run_padded(stack, steps, first[0], first[1]);
    return {batch_first ? done.output.transpose(0, 1) : done.output, done.h, done.c};
  }
  stack.check(steps.size(1), steps.size(2), first[0], first[1]);
  const Outcome done = run_stack(stack, steps.contiguous(), first[0].contiguous(),
                                 first[1].contiguous(), over_fused_lstm(stack, batch_first));
  return {batch_first ? done.output.transpose(0, 1) : done.output, done.h, done.c};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> packed_lstm(
    const at::Tensor& data, const at::Tensor& batch_sizes, at::TensorList hx, at::TensorList params,
    bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  const std::vector<at::Tensor> first = lowered(hx);
  const std::vector<at::Tensor> weights = lowered(params);
  const Outcome done =
      run_packed({RnnKind::kLstm, weights, has_biases, num_layers, dropout, train, bidirectional},
                 lowered(data), batch_sizes, first[0], first[1]);
  return {done.output, done.h, done.c};
}

// Layers with one state.
template <RnnKind Kind>
std::tuple<at::Tensor, at::Tensor> padded(const at::Tensor& input, const at::Tensor& hx,
                                          at::TensorList params, bool has_biases,
                                          int64_t num_layers, double dropout, bool train,
                                          bool bidirectional, bool batch_first) {
  const std::vector<at::Tensor> weights = lowered(params);
  const Outcome done =
      run_padded({Kind, weights, has_biases, num_layers, dropout, train, bidirectional},
                 steps_first(lowered(input), batch_first), lowered(hx), {});
  return {batch_first ? done.output.transpose(0, 1) : done.output, done.h};
}

template <RnnKind Kind>
std::tuple<at::Tensor, at::Tensor> packed(const at::Tensor& data, const at::Tensor& batch_sizes,
                                          const at::Tensor& hx, at::TensorList params,
                                          bool has_biases, int64_t num_layers, double dropout,
                                          bool train, bool bidirectional) {
  const std::vector<at::Tensor> weights = lowered(params);
  const Outcome done =
      run_packed({Kind, weights, has_biases, num_layers, dropout, train, bidirectional},
                 lowered(data), batch_sizes, lowered(hx), {});
  return {done.output, done.h};
}

void register_layers(torch::Library& m) {
  m.impl("lstm.input", &lstm);
  m.impl("lstm.data", &packed_lstm);
  m.impl("gru.input", &padded<RnnKind::kGru>);
  m.impl("gru.data", &packed<RnnKind::kGru>);
  m.impl("rnn_tanh.input", &padded<RnnKind::kTanh>);
  m.impl("rnn_tanh.data", &packed<RnnKind::kTanh>);
  m.impl("rnn_relu.input", &padded<RnnKind::kRelu>);
  m.impl("rnn_relu.data", &packed<RnnKind::kRelu>);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_layers(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_layers(m); }

}  // namespace
}  // namespace acc::aten
