#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <vector>

// What processes do together, as operators of the library `acc` that are recorded like any other:
//
//   acc::NAME_(Tensor(a!)[] outputs, Tensor[] inputs, int group, int[] options, int ticket) -> ()
//
// Tensors are contiguous. `ticket`: the call only begins, and acc::await_ with the same ticket
// waits for the end (lazy/passes/transfers.h); negative: it returns when all is done. The first of
// `options` is the call's timeout in milliseconds; negative: the group's.
namespace acc::distributed {

// In the order of the table in collectives.cpp, which says what outputs, inputs and options are.
enum class Collective : uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kAllGatherInto,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterInto,
  kAllToAll,
  kAllToAllSingle,
};

// "all_reduce"
const char* name(Collective collective);

// Records a call. Tensors are acc's, of one device. `options`: those behind the timeout.
void record(Collective collective, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
            int64_t group, std::chrono::milliseconds timeout, std::vector<int64_t> options);

}  // namespace acc::distributed
