#include "csrc/aten/rnn_cudnn.h"

#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/on_device.h"
#include "lazy/session/session.h"

// The operators are in kernels/library/rnn.cpp.
namespace acc::aten {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

MaybeTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

c10::OperatorHandle operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// cuDNN's numbering.
int64_t mode_of(RnnKind kind) {
  switch (kind) {
    case RnnKind::kRelu:
      return 0;
    case RnnKind::kTanh:
      return 1;
    case RnnKind::kLstm:
      return 2;
    case RnnKind::kGru:
      return 3;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// ---- what only cuDNN knows ---------------------------------------------------------------------

struct Layout {
  int64_t reserve_bytes;
  int64_t elements;              // of the vector of all weights
  std::vector<int64_t> offsets;  // of each weight in it
};

// Asked once for each geometry, since to ask is to run the layer. Nothing: cuDNN has no such layer.
std::optional<Layout> layout_of(const RnnLayers& layers, const Tensor& input, int64_t hidden,
                                bool train) {
  static const c10::OperatorHandle handle = operator_of("acc::cudnn_rnn_layout");
  const c10::DispatchKey key = runtime::on_host() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  if (!handle.hasKernelForDispatchKey(key)) return std::nullopt;
  // The precision of float32 products chooses cuDNN's algorithm.
  const bool tf32 = at::globalContext().allowTF32CuDNN(at::Float32Op::RNN);
  const std::array<int64_t, 11> geometry{input.device().index(),
                                         static_cast<int64_t>(input.scalar_type()),
                                         input.size(0),
                                         input.size(1),
                                         input.size(2),
                                         hidden,
                                         mode_of(layers.kind),
                                         layers.num_layers,
                                         layers.bidirectional,
                                         train,
                                         tf32};
  static auto& known = *new std::map<std::array<int64_t, 11>, std::vector<int64_t>>;
  static std::mutex mutex;
  std::unique_lock lock(mutex);
  auto found = known.find(geometry);
  if (found == known.end()) {
    lock.unlock();
    const c10::DeviceIndex device = input.device().index();
    const runtime::OnDevice on_device(device);
    const at::AutoDispatchBelowADInplaceOrView below;
    runtime::await_program_settings();
    std::vector<int64_t> asked;
    const auto ask = [&] {
      return handle
          .typed<std::vector<int64_t>(at::IntArrayRef, int64_t, int64_t, int64_t, bool, bool,
                                      c10::ScalarType, c10::Device)>()
          .redispatch(c10::DispatchKeySet(key), input.sizes(), hidden, mode_of(layers.kind),
                      layers.num_layers, layers.bidirectional, train, input.scalar_type(),
                      c10::Device(runtime::backend().alias_type(), device));
    };
    session::with_memory(device, "[acc::cudnn_rnn_layout] failed", /*may_repeat=*/true,
                         [&] { asked = runtime::await_device(device, ask); });
    lock.lock();
    found = known.emplace(geometry, asked).first;
  }
  const std::vector<int64_t>& numbers = found->second;
  if (numbers.empty()) return std::nullopt;
  return Layout{numbers[0], numbers[1], {numbers.begin() + 2, numbers.end()}};
}

// ---- autograd ----------------------------------------------------------------------------------

FourTensors call_backward(const Tensor& input, const Tensor& weights, const Tensor& h,
                          const MaybeTensor& c, const Tensor& output,
                          const MaybeTensor& grad_output, const MaybeTensor& grad_h,
                          const MaybeTensor& grad_c, const Tensor& reserve, int64_t mode,
                          int64_t num_layers, bool bidirectional) {
  static const auto op =
      operator_of("acc::cudnn_rnn_backward")
          .typed<FourTensors(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                             const Tensor&, const MaybeTensor&, const MaybeTensor&,
                             const MaybeTensor&, const Tensor&, int64_t, int64_t, bool)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(input, weights, h, c, output, grad_output, grad_h, grad_c, reserve, mode,
                 num_layers, bidirectional);
}

// The backward as a function of its own, to say that it has no backward.
class CudnnRnnBackward : public torch::autograd::Function<CudnnRnnBackward> {
 public:
  static variable_list forward(AutogradContext*, const Tensor& input, const Tensor& weights,
                               const Tensor& h, const MaybeTensor& c, const Tensor& output,
                               const MaybeTensor& grad_output, const MaybeTensor& grad_h,
                               const MaybeTensor& grad_c, const Tensor& reserve, int64_t mode,
                               int64_t num_layers, bool bidirectional) {
    auto [grad_input, grad_weights, grad_first_h, grad_first_c] =
        call_backward(input, weights, h, c, output, grad_output, grad_h, grad_c, reserve, mode,
                      num_layers, bidirectional);
    return {grad_input, grad_weights, grad_first_h, grad_first_c};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cuDNN's recurrent layers have no second derivatives. Compute the forward under "
        "torch.backends.cudnn.flags(enabled=False): then cells do it, which have.");
  }
};

FourTensors call_forward(const Tensor& input, const Tensor& weights, const Tensor& h,
                         const MaybeTensor& c, int64_t mode, int64_t num_layers, bool bidirectional,
                         bool train, int64_t reserve_bytes) {
  static const auto op =
      operator_of("acc::cudnn_rnn")
          .typed<FourTensors(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                             int64_t, int64_t, bool, bool, int64_t)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(input, weights, h, c, mode, num_layers, bidirectional, train, reserve_bytes);
}

class CudnnRnn : public torch::autograd::Function<CudnnRnn> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& input, const Tensor& weights,
                               const Tensor& h, const MaybeTensor& c, int64_t mode,
                               int64_t num_layers, bool bidirectional, int64_t reserve_bytes) {
    auto [output, last_h, last_c, reserve] = call_forward(
        input, weights, h, c, mode, num_layers, bidirectional, /*train=*/true, reserve_bytes);
    context->save_for_backward({input, weights, h, c.value_or(Tensor()), output, reserve});
    context->saved_data["mode"] = mode;
    context->saved_data["num_layers"] = num_layers;
    context->saved_data["bidirectional"] = bidirectional;
    context->set_materialize_grads(false);
    if (!c.has_value()) context->mark_non_differentiable({last_c});
    return {output, last_h, last_c};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& c = saved[3];
    // The backward writes it.
    const Tensor reserve =
        torch::autograd::get_current_graph_task_keep_graph() ? saved[5].clone() : saved[5];
    variable_list made = CudnnRnnBackward::apply(
        saved[0], saved[1], saved[2], maybe(c), saved[4], maybe(grads[0]), maybe(grads[1]),
        c.defined() ? maybe(grads[2]) : std::nullopt, reserve, context->saved_data["mode"].toInt(),
        context->saved_data["num_layers"].toInt(), context->saved_data["bidirectional"].toBool());
    if (!c.defined()) made[3] = Tensor();
    made.resize(8);  // numbers have no gradients
    return made;
  }
};

// ---- weights -----------------------------------------------------------------------------------

// All weights one after the other where cuDNN wants them, zeros in between. They are copied in each
// step: parameters are the program's, and each may get other memory at any time.
Tensor vector_of(const std::vector<RnnWeights>& weights, const Layout& layout) {
  const c10::TensorOptions options = weights[0].w_ih.options();
  std::vector<std::pair<int64_t, Tensor>> parts;
  for (const auto& [w_ih, w_hh, b_ih, b_hh, w_hr] : weights) {
    for (const Tensor* part : {&w_ih, &w_hh, &b_ih, &b_hh}) {
      const int64_t offset = layout.offsets.at(parts.size());
      parts.emplace_back(
          offset, part->defined() ? part->reshape({-1}) : at::zeros({w_ih.size(0)}, options));
    }
  }
  std::ranges::sort(parts, {}, [](const auto& part) { return part.first; });
  std::vector<Tensor> pieces;
  int64_t end = 0;
  const auto fill_until = [&](int64_t offset) {
    TORCH_INTERNAL_ASSERT(offset >= end);
    if (offset > end) pieces.push_back(at::zeros({offset - end}, options));
  };
  for (const auto& [offset, part] : parts) {
    fill_until(offset);
    pieces.push_back(part);
    end = offset + part.numel();
  }
  fill_until(layout.elements);
  return at::cat(pieces);
}

bool has_type_of_cudnn(c10::ScalarType type) {
  return type == c10::kFloat || type == c10::kDouble || type == c10::kHalf ||
         type == c10::kBFloat16;
}

}  // namespace

std::optional<std::tuple<Tensor, Tensor, Tensor>> cudnn_layers(
    const RnnLayers& layers, const Tensor& input, const Tensor& h, const Tensor& c,
    const std::vector<RnnWeights>& weights) {
  const at::Context& context = at::globalContext();
  if (!session::for_gpus() || !context.userEnabledCuDNN() || input.numel() == 0) {
    return std::nullopt;
  }
  std::vector<Tensor> all{input, h};
  if (c.defined()) all.push_back(c);
  for (const auto& [w_ih, w_hh, b_ih, b_hh, w_hr] : weights) {
    // Layers with projections are rare; cells have them.
    if (w_hr.defined()) return std::nullopt;
    all.insert(all.end(), {w_ih, w_hh});
    if (b_ih.defined()) all.insert(all.end(), {b_ih, b_hh});
  }
  const c10::ScalarType type = input.scalar_type();
  const auto fits = [&](const Tensor& tensor) {
    return tensor.scalar_type() == type && tensor.device() == input.device();
  };
  if (!has_type_of_cudnn(type) || !std::ranges::all_of(all, fits) ||
      at::areAnyTensorSubclassLike(all)) {
    return std::nullopt;
  }
  const bool gradients =
      at::GradMode::is_enabled() &&
      std::ranges::any_of(all, [](const Tensor& t) { return t.requires_grad(); });
  // cuDNN has gradients of layers in training mode only.
  if (gradients && !layers.train) return std::nullopt;
  const auto layout = layout_of(layers, input, h.size(2), gradients);
  if (!layout.has_value()) return std::nullopt;
  const int64_t mode = mode_of(layers.kind);
  const Tensor first_h = h.contiguous();
  const MaybeTensor first_c = c.defined() ? MaybeTensor(c.contiguous()) : std::nullopt;
  const Tensor vector = vector_of(weights, *layout);
  if (gradients) {
    const variable_list made =
        CudnnRnn::apply(input, vector, first_h, first_c, mode, layers.num_layers,
                        layers.bidirectional, layout->reserve_bytes);
    return std::tuple(made[0], made[1], made[2]);
  }
  const auto [output, last_h, last_c, reserve] =
      call_forward(input, vector, first_h, first_c, mode, layers.num_layers, layers.bidirectional,
                   /*train=*/false, layout->reserve_bytes);
  return std::tuple(output, last_h, last_c);
}

}  // namespace acc::aten
