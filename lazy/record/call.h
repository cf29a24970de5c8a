#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "lazy/graph/op.h"
#include "lazy/graph/words.h"

// One call of an operator: whether it can be recorded, and in what words.
namespace acc::record {

inline bool on_acc(const c10::TensorImpl* impl) {
  return impl->key_set().has(c10::DispatchKey::PrivateUse1);
}

inline uint8_t lazy_bits(const c10::TensorImpl* impl) {
  return static_cast<uint8_t>((impl->is_conj() ? graph::kConjFlag : 0) |
                              (impl->is_neg() ? graph::kNegFlag : 0));
}

// What tensors of a call hold, as far as it decides where its numbers go.
struct Kinds {
  bool integers = false;  // or truths
  bool halves = false;    // float16
  bool bfloats = false;   // bfloat16
  void add(const c10::TensorImpl* impl) {
    const auto type = c10::typeMetaToScalarType(impl->dtype());
    integers |= c10::isIntegralType(type, /*includeBool=*/true);
    halves |= type == c10::kHalf;
    bfloats |= type == c10::kBFloat16;
  }
};

// The device index of the first acc tensor among the last `n` values of the stack; -1: there is
// none.
c10::DeviceIndex device_of(const torch::jit::Stack& stack, size_t n);

// Whether ATen may refuse to convert the number to the type of the tensors.
inline bool overflows(const c10::IValue& value, Kinds kinds) {
  if (!value.isDouble() && !value.isInt()) return false;
  const double number =
      std::abs(value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble());
  const float most = kinds.halves    ? static_cast<float>(std::numeric_limits<c10::Half>::max())
                     : kinds.bfloats ? static_cast<float>(std::numeric_limits<c10::BFloat16>::max())
                                     : std::numeric_limits<float>::max();
  return number > static_cast<double>(most) && std::isfinite(number);
}

// Whether a number goes into the value block. `kinds`: of the tensors before it.
inline bool is_slot(const c10::IValue& value, const graph::Argument& argument, Kinds kinds) {
  // A factor that nobody gave: passes may rely on it (accumulate.h).
  if (argument.scales && value.isInt() && value.toInt() == 1) return false;
  if (argument.checked && overflows(value, kinds)) return false;
  if (argument.role != graph::Role::kValue || !kinds.integers || !value.isInt()) {
    return argument.role != graph::Role::kStructure;
  }
  return std::in_range<int32_t>(value.toInt());
}

struct Operand {
  const at::Tensor* tensor;
  uint32_t word;  // position of its tag
  bool writes;
  bool host;
};

// ATen refuses in-place calls whose operands overlap in part or with themselves, and for all but
// pointwise operators those that write what they read. Its check needs real operands, so such a
// call runs at once; ATen then decides.
bool overlap(const graph::Op& op, std::span<const Operand> operands);
bool overlap(const graph::Op& op, const torch::jit::Stack& stack);

// Whether a tensor that is about to take another geometry shares its memory with another operand.
bool is_also_read(const at::Tensor& resized, std::span<const Operand> operands);

// A call in words, made outside the recorder's lock: its buffers are still unnumbered.
struct Call {
  const graph::Op* op = nullptr;
  uint64_t ambient = 0;
  std::vector<int64_t> words;  // operator id and ambient word first: the memo's signature
  std::vector<int64_t> values;
  std::vector<Operand> operands;
  std::vector<at::Tensor> snapshots;
  c10::DeviceIndex device = -1;
  Kinds kinds;  // of the tensors so far

  static constexpr size_t kPrefix = 2;

  void begin(const graph::Op& operation, uint64_t ambient_word);
  // False: the value has a type that only a direct call can pass on. Throws for a tensor of a
  // device that the operator does not take.
  bool add(const c10::IValue& value, const graph::Argument& argument);

 private:
  bool add_tensor(const at::Tensor& tensor, const graph::Argument& argument, bool listed);
  bool add_number(const at::Tensor& tensor);
  bool add_plain(const c10::IValue& value, bool slot);
  bool add_list(c10::ArrayRef<c10::IValue> items, const graph::Argument& argument);
};

}  // namespace acc::record
