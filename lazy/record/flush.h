#pragma once

#include <cstdint>

// Why pending work was submitted. Each reason has a counter.
namespace acc::record {

enum class FlushReason : uint8_t {
  kExplicit,       // torchacc.sync(), synchronize()
  kRead,           // item(), a copy to the CPU, printing
  kStep,           // the end of optimizer.step()
  kLoader,         // the loader handed out the next batch
  kFallback,       // an operator that cannot be recorded
  kDataDependent,  // an operator whose result's shape depends on data
  kCap,            // too many pending nodes
  kEvent,          // an event or stream was queried
  kResize,         // a storage with contents was resized
  kPointer,        // somebody asked for an address
  kEager,          // ACC_MODE=eager or nofuse
  kExit,           // the process ends
  kExchange,       // other processes wait for what is sent
  kIdle,           // nothing was recorded for a while behind something that others wait for
};

}  // namespace acc::record
