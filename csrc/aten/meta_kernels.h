#pragma once

namespace acc::aten {

// Teaches the recorder the results of common operators without Python. PyTorch replaces the C++
// Meta kernels of most operators by Python ones, which cost more and, called for the first time,
// import torch._dynamo or a symbolic algebra system: up to 0.9 s and 100 MiB.
void register_meta_kernels();

}  // namespace acc::aten
