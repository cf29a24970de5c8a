#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/host_heap.h"
#include "csrc/runtime/on_device.h"
#include "csrc/runtime/transfers.h"

namespace acc::exec {

// What steps run in: as in a fresh thread, below autograd and outside the modes and transforms of
// whoever caused the flush.
class Surroundings {
 public:
  explicit Surroundings(c10::DeviceIndex device)
      : on_device_(device), transfers_(device), heap_(runtime::on_host()) {}

  runtime::AmbientScope ambient;

 private:
  c10::impl::ForceDispatchKeyGuard clean_{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  const runtime::OnDevice on_device_;
  const runtime::TransfersOf transfers_;
  // What operators allocate lives as long as what the plan allocates: both from one place.
  const runtime::HostHeapScope heap_;
};

}  // namespace acc::exec
