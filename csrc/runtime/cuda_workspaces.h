#pragma once

#include <c10/cuda/CUDAStream.h>

// Where cuBLAS and cublasLt compute in between.
namespace acc::runtime {

// Captured work has the address of the workspace that torch keeps for the thread's handle and the
// stream of the capture. From torch 2.12 on the end of any graph frees the workspaces of the stream
// that it was captured on, and all of ours are captured on one (pytorch/pytorch issue 193402).
// So these are ours, and torch only borrows them: one for each device, which is never freed. One
// is enough, since all that is captured runs on one stream, whichever thread submits it.
//
// Call it before work is captured on `stream`, by the thread that does, with the stream's device
// current and memory coming from no pool of captured work.
void lend_workspaces(c10::cuda::CUDAStream stream);

}  // namespace acc::runtime
