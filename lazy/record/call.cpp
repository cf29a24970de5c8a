#include "lazy/record/call.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cstring>

#include "lazy/record/infer.h"
#include "lazy/record/numbers.h"
#include "lazy/record/overlap.h"
#include "lazy/record/recorder.h"
#include "lazy/record/storage.h"

namespace acc::record {

using graph::Tag;

static void check_takes_cpu(const graph::Op& op, const graph::Argument& argument,
                            c10::DeviceIndex device) {
  TORCH_CHECK(argument.cpu_ok,
              "Expected all tensors to be on the same device, but found at least two devices, acc:",
              static_cast<int>(device), " and cpu! (when checking argument '", argument.name,
              "' of ", op.name, "). Move it with .to(\"acc\") first.");
}

c10::DeviceIndex device_of(const torch::jit::Stack& stack, size_t n) {
  for (size_t i = stack.size() - n; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      const at::Tensor& tensor = stack[i].toTensor();
      if (tensor.defined() && on_acc(tensor.unsafeGetTensorImpl())) return tensor.device().index();
    } else if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toListRef()) {
        if (!item.isTensor() || !item.toTensor().defined()) continue;
        const at::Tensor& tensor = item.toTensor();
        if (on_acc(tensor.unsafeGetTensorImpl())) return tensor.device().index();
      }
    }
  }
  return -1;
}

bool overlap(const graph::Op& op, std::span<const Operand> operands) {
  for (const Operand& written : operands) {
    if (!written.writes) continue;
    if (at::has_internal_overlap(written.tensor->unsafeGetTensorImpl()) == at::MemOverlap::Yes) {
      return true;
    }
    for (const Operand& other : operands) {
      if (&other == &written || !written.tensor->is_alias_of(*other.tensor)) continue;
      const auto status = overlap_status(*written.tensor, *other.tensor);
      if (status == at::MemOverlapStatus::Full && op.pointwise) continue;
      if (status != at::MemOverlapStatus::No) return true;
    }
  }
  return false;
}

bool overlap(const graph::Op& op, const torch::jit::Stack& stack) {
  c10::SmallVector<Operand, 8> operands;
  const size_t base = stack.size() - op.arguments.size();
  const auto add = [&](const c10::IValue& value, bool writes) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    if (!on_acc(value.toTensor().unsafeGetTensorImpl())) return;
    operands.push_back({&value.toTensor(), 0, writes, false});
  };
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const c10::IValue& value = stack[base + i];
    const bool writes = op.arguments[i].writes;
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) add(item, writes);
    } else {
      add(value, writes);
    }
  }
  return overlap(op, operands);
}

bool is_also_read(const at::Tensor& resized, std::span<const Operand> operands) {
  return std::ranges::any_of(operands, [&](const Operand& other) {
    return !other.writes && other.tensor->is_alias_of(resized);
  });
}

void Call::begin(const graph::Op& operation, uint64_t ambient_word) {
  op = &operation;
  ambient = ambient_word;
  words.clear();
  values.clear();
  operands.clear();
  snapshots.clear();
  device = -1;
  kinds = {};
  words.push_back(static_cast<int64_t>(operation.id));
  words.push_back(static_cast<int64_t>(ambient_word));
}

bool Call::add(const c10::IValue& value, const graph::Argument& argument) {
  if (value.isTensor()) return add_tensor(value.toTensor(), argument, /*listed=*/false);
  if (value.isList()) return add_list(value.toListRef(), argument);
  return add_plain(value, is_slot(value, argument, kinds));
}

bool Call::add_tensor(const at::Tensor& tensor, const graph::Argument& argument, bool listed) {
  if (!tensor.defined()) {
    words.push_back(graph::make_tag(Tag::kUndefined));
    return true;
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const bool acc = on_acc(impl);
  if (!acc) {
    if (impl->device_type() != c10::DeviceType::CPU || impl->layout() != c10::kStrided ||
        argument.reads_on_cpu) {
      return false;
    }
    const bool number = impl->dim() == 0 && !argument.writes;
    // In a list it is an index, or stands beside one item: kernels for the whole list take no
    // numbers.
    if (number && (!listed || op->item != nullptr)) return add_number(tensor);
    if (number && !argument.cpu_ok) return false;
    check_takes_cpu(*op, argument, device < 0 ? c10::DeviceIndex{0} : device);
  } else if (device < 0) {
    device = impl->device().index();
  } else {
    TORCH_CHECK(device == impl->device().index(),
                "Expected all tensors to be on the same device, but found at least two devices, "
                "acc:",
                static_cast<int>(device), " and acc:", static_cast<int>(impl->device().index()),
                "! (when checking argument '", argument.name, "' of ", op->name,
                "). Move it with .to(\"acc:", static_cast<int>(device), "\") first.");
  }
  // Somebody else reads and writes its memory, at any time.
  if (acc && storage_of(tensor)->observed) return false;
  const auto dims = static_cast<size_t>(impl->dim());
  kinds.add(impl);
  operands.push_back({&tensor, static_cast<uint32_t>(words.size()), argument.writes, !acc});
  words.push_back(graph::make_tag(Tag::kTensor,
                                  static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype())),
                                  lazy_bits(impl), dims));
  words.push_back(0);
  words.push_back(0);
  const auto sizes = impl->sizes();
  words.insert(words.end(), sizes.begin(), sizes.end());
  if (acc) {
    const auto strides = impl->strides();
    words.insert(words.end(), strides.begin(), strides.end());
  } else {  // what is kept is a copy
    const auto strides = strides_of_copy(tensor);
    words.insert(words.end(), strides.begin(), strides.end());
  }
  return true;
}

bool Call::add_number(const at::Tensor& tensor) {
  words.push_back(number_tag(tensor));
  append_number(tensor, &values);
  return true;
}

bool Call::add_plain(const c10::IValue& value, bool slot) {
  const uint8_t flag = slot ? graph::kValueFlag : 0;
  std::vector<int64_t>& payload = slot ? values : words;
  if (value.isNone()) {
    words.push_back(graph::make_tag(Tag::kNone));
  } else if (value.isInt()) {
    words.push_back(graph::make_tag(Tag::kInt, 0, flag));
    payload.push_back(value.toInt());
  } else if (value.isDouble()) {
    words.push_back(graph::make_tag(Tag::kFloat, 0, flag));
    payload.push_back(to_bits(value.toDouble()));
  } else if (value.isBool()) {
    words.push_back(graph::make_tag(Tag::kBool, 0, flag));
    payload.push_back(value.toBool() ? 1 : 0);
  } else if (value.isComplexDouble()) {
    words.push_back(graph::make_tag(Tag::kComplex, 0, flag));
    payload.push_back(to_bits(value.toComplexDouble().real()));
    payload.push_back(to_bits(value.toComplexDouble().imag()));
  } else if (value.isDevice()) {
    words.push_back(graph::make_tag(Tag::kDevice));
  } else if (value.isString()) {
    const std::string_view text = value.toStringView();
    words.push_back(graph::make_tag(Tag::kString, 0, 0, text.size()));
    const size_t begin = words.size();
    words.resize(begin + (text.size() + 7) / 8, 0);
    std::memcpy(words.data() + begin, text.data(), text.size());
  } else {
    return false;
  }
  return true;
}

bool Call::add_list(c10::ArrayRef<c10::IValue> items, const graph::Argument& argument) {
  words.push_back(graph::make_tag(Tag::kList, 0, 0, items.size()));
  for (const c10::IValue& item : items) {
    if (item.isTensor()) {
      if (!add_tensor(item.toTensor(), argument, /*listed=*/true)) return false;
    } else if (!add_plain(item, is_slot(item, argument, kinds))) {
      return false;
    }
  }
  return true;
}

}  // namespace acc::record
