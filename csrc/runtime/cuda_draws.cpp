#include "csrc/runtime/cuda_draws.h"

#include <ATen/core/Tensor.h>

#include <mutex>
#include <type_traits>
#include <utility>

namespace acc::runtime {
namespace {

// Torch 2.11 has one place for what is captured, later versions one for each capture.
template <class State>
void capture_from(State& state, at::TensorBase seed, at::TensorBase offset, c10::CaptureId_t id) {
  if constexpr (requires { state.capturing_; }) {
    state.capturing_ = true;
    state.seed_extragraph_ = std::move(seed);
    state.offset_extragraph_ = std::move(offset);
  } else {
    auto& made = state.capture_states_[id];
    made = c10::make_intrusive<std::remove_reference_t<decltype(*made)>>();
    made->rng_state_seed_extragraph_ = std::move(seed);
    made->rng_state_offset_extragraph_ = std::move(offset);
  }
}

}  // namespace

c10::intrusive_ptr<at::CUDAGeneratorState> state_of(base::Stream stream,
                                                    const at::TensorBase& philox,
                                                    std::optional<c10::CaptureId_t> capture) {
  auto state = c10::make_intrusive<at::CUDAGeneratorState>(stream.seed, stream.offset);
  if (capture.has_value()) {
    const at::Tensor words(philox);
    capture_from(*state, words.narrow(0, 0, 1), words.narrow(0, 1, 1), *capture);
  }
  return state;
}

CudaDraws::CudaDraws(at::CUDAGeneratorImpl& generator, base::Stream stream,
                     const at::TensorBase& philox, std::optional<c10::CaptureId_t> capture)
    : generator_(generator) {
  auto own = c10::make_intrusive<at::CUDAGeneratorImpl>(generator.device().index(),
                                                        state_of(stream, philox, capture));
  const std::lock_guard lock(generator.mutex_);
  before_ = generator.graphsafe_get_state();
  generator.graphsafe_set_state(std::move(own));
}

CudaDraws::~CudaDraws() {
  const std::lock_guard lock(generator_.mutex_);
  generator_.graphsafe_set_state(before_);
}

}  // namespace acc::runtime
