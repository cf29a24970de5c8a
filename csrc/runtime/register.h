#pragma once

namespace acc::runtime {

// Makes `acc` the name of PrivateUse1 and registers its allocators, hooks and fork handler; the
// guard registers itself when the library is loaded. Checks every ACC_* variable first. Idempotent.
// Throws when another backend has taken PrivateUse1 in this process, and for ACC_EXECUTOR=cuda
// where no GPU is usable. Makes no CUDA context.
void register_runtime();

}  // namespace acc::runtime
