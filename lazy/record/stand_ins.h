#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "lazy/graph/op.h"

namespace acc::record {

// An argument for the same call on another device: `replace` makes what stands in for each tensor.
template <class Replace>
c10::IValue stand_in(const c10::IValue& value, graph::ListOf list, c10::DeviceType device,
                     const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isDevice()) return c10::Device(device);
  if (list == graph::ListOf::kTensor) {
    c10::List<at::Tensor> tensors;
    for (const c10::IValue& item : value.toListRef()) tensors.push_back(replace(item.toTensor()));
    return tensors;
  }
  if (list == graph::ListOf::kOptionalTensor && value.isList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const c10::IValue& item : value.toListRef()) {
      tensors.push_back(item.isTensor() ? std::optional<at::Tensor>(replace(item.toTensor()))
                                        : std::nullopt);
    }
    return tensors;
  }
  return value;
}

}  // namespace acc::record
