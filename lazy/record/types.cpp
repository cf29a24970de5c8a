#include "lazy/record/types.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/on_device.h"
#include "lazy/graph/words.h"
#include "lazy/record/call.h"
#include "lazy/record/stand_ins.h"
#include "lazy/record/storage.h"

namespace acc::record {
namespace {

using graph::Tag;

constexpr size_t kMaxBytes = size_t{16} << 20;

std::mutex known_mutex;
std::set<std::vector<int64_t>>& known() {
  static auto& table = *new std::set<std::vector<int64_t>>;  // never destroyed, as in infer.cpp
  return table;
}
thread_local Doubt doubted;

bool is_plain(c10::ScalarType type) { return type == c10::kFloat || type == c10::kDouble; }

// What is said of types in a call.
struct Types {
  std::vector<int64_t> key;  // the operator, the tags of its arguments and the types it is given
  bool plain = true;         // only float32, only float64, or neither
  bool mixed = false;        // tensors of several types
  bool integers = false;     // among them
  bool empty = false;        // a tensor has no elements
  std::optional<c10::ScalarType> first;

  void add(const graph::Argument& argument, const int64_t* word) {
    key.push_back(*word);
    const auto type = static_cast<c10::ScalarType>(graph::dtype_of(*word));
    switch (graph::tag_of(*word)) {
      case Tag::kTensor: {
        plain &= is_plain(type);
        mixed |= type != first.value_or(type);
        integers |= c10::isIntegralType(type, /*includeBool=*/true);
        empty |= std::ranges::count(graph::read_tensor(word).sizes, 0) > 0;
        first = type;
        break;
      }
      case Tag::kNumber:
        plain &= !c10::isComplexType(type);
        break;
      case Tag::kBool:  // a flag, or a number
        plain &= argument.role == graph::Role::kStructure;
        break;
      case Tag::kComplex:
        plain = false;
        break;
      case Tag::kInt:
        if (!argument.is_type) break;
        key.push_back(word[1]);
        plain &= is_plain(static_cast<c10::ScalarType>(word[1]));
        break;
      case Tag::kList: {
        const uint32_t items = graph::count_of(*word++);
        for (uint32_t i = 0; i < items; ++i) {
          add(argument, word);
          word += graph::item_words(word);
        }
        break;
      }
      default:
        break;
    }
  }
};

Types types_of(std::span<const int64_t> signature, const graph::Op& op) {
  Types types;
  types.key.push_back(signature[0]);
  const int64_t* word = signature.data() + 2;
  for (const graph::Argument& argument : op.arguments) {
    types.add(argument, word);
    word += graph::item_words(word);
  }
  return types;
}

// A tensor like an operand that nobody keeps.
at::Tensor throw_away(const at::Tensor& operand) {
  if (!operand.defined() || operand.device().type() != c10::DeviceType::PrivateUse1) return operand;
  at::Tensor made = at::empty_strided(
      operand.sizes(), operand.strides(),
      at::TensorOptions(operand.scalar_type()).device(runtime::backend().alias_type()));
  const bool integers = c10::isIntegralType(operand.scalar_type(), /*includeBool=*/true);
  made.fill_(integers ? 0 : 1);
  copy_flags(operand, made);
  return made;
}

size_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().nbytes() : 0;
  size_t bytes = 0;
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) bytes += bytes_of(item);
  }
  return bytes;
}

// Whether the kernel ends without an error.
bool runs(const graph::Op& op, const c10::OperatorHandle& handle,
          c10::ArrayRef<c10::IValue> arguments) {
  // As the runner calls it.
  c10::impl::ForceDispatchKeyGuard clean(
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const runtime::OnDevice on_device(device_of(arguments.vec(), arguments.size()));
  base::count(base::Counter::TypesAsked);
  torch::jit::Stack stack;
  try {
    for (size_t i = 0; i < arguments.size(); ++i) {
      stack.push_back(stand_in(arguments[i], op.arguments[i].list, runtime::backend().alias_type(),
                               &throw_away));
    }
    handle.callBoxed(stack);
  } catch (const std::exception& error) {
    if (runtime::is_interrupt(error)) throw;
    return false;
  }
  return true;
}

void believe(std::vector<int64_t> types) {
  // A program does not use more in earnest; one that generates them may ask again.
  constexpr size_t kMaxKnown = 100'000;
  const std::lock_guard lock(known_mutex);
  if (known().size() >= kMaxKnown) known().clear();
  known().insert(std::move(types));
}

}  // namespace

bool takes_types(std::span<const int64_t> signature, const graph::Op& op,
                 const c10::OperatorHandle& handle, c10::ArrayRef<c10::IValue> arguments,
                 uint64_t result_bytes) {
  if (!op.name.starts_with("aten::") || !op.mergeable) return true;
  // It takes what the forward operator made, workspaces of its own among it.
  if (op.name.find("_backward") != std::string::npos) return true;
  Types types = types_of(signature, op);
  if (types.plain && !types.mixed) return true;
  // Integers beside fractions are positions, pivots, lengths, which not every kernel checks.
  if (types.mixed && types.integers && !op.pointwise) return true;
  // A kernel that has nothing to do may not look at the types: what it says holds for this call.
  if (types.empty) return runs(op, handle, arguments);
  {
    const std::lock_guard lock(known_mutex);
    if (known().contains(types.key)) return true;
  }
  size_t bytes = result_bytes;
  for (const c10::IValue& argument : arguments) bytes += bytes_of(argument);
  if (bytes > kMaxBytes || !runs(op, handle, arguments)) {
    doubted = std::move(types.key);
    return false;
  }
  believe(std::move(types.key));
  return true;
}

Doubt take_doubt() { return std::exchange(doubted, {}); }

void dismiss(const Doubt& doubt) {
  if (!doubt.empty()) believe(doubt);
}

}  // namespace acc::record
