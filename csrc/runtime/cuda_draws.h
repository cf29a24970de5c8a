#pragma once

#include <ATen/core/TensorBase.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>

#include "csrc/base/philox.h"

namespace acc::runtime {

// While one lives, kernels of ATen's that draw from torch's generator of a GPU draw from a stream
// of ours, and the generator stays where it was: launched ones from `stream`, captured ones from
// what `philox` holds when their graph is launched, int64 [2] on the GPU, seed and offset. Torch's
// graphs hold one seed and offset for all that is captured in them, told before each launch; these
// are different ones for each call, made in the graph.
//
// Threads that draw for CUDA tensors of a program meanwhile draw from there, too.
class CudaDraws {
 public:
  // `capture`: of the current stream; none where it is not captured.
  CudaDraws(at::CUDAGeneratorImpl& generator, base::Stream stream, const at::TensorBase& philox,
            std::optional<c10::CaptureId_t> capture);
  ~CudaDraws();
  CudaDraws(const CudaDraws&) = delete;
  CudaDraws& operator=(const CudaDraws&) = delete;

 private:
  at::CUDAGeneratorImpl& generator_;
  c10::intrusive_ptr<c10::GeneratorImpl> before_;
};

// What torch's generators hold of such a stream.
c10::intrusive_ptr<at::CUDAGeneratorState> state_of(base::Stream stream,
                                                    const at::TensorBase& philox,
                                                    std::optional<c10::CaptureId_t> capture);

}  // namespace acc::runtime
