#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distributed/collectives.h"

namespace acc::distributed {

// What all ranks must agree on in a call: its name, and where they have them alike, types, sizes
// and options.
struct Described {
  uint64_t kind;  // a hash of it
  std::string text;
};
Described described(Collective collective, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::IntArrayRef options);

}  // namespace acc::distributed
