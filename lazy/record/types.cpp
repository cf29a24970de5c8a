#include "lazy/record/types.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "csrc/runtime/on_device.h"
#include "lazy/graph/words.h"
#include "lazy/record/recorder.h"
#include "lazy/record/stand_ins.h"
#include "lazy/record/storage.h"

namespace acc::record {
namespace {

using graph::Tag;

constexpr size_t kMaxBytes = size_t{16} << 20;

std::mutex mutex;
std::set<std::vector<int64_t>>& known() {
  static std::set<std::vector<int64_t>> table;
  return table;
}
thread_local Doubt doubted;

bool is_plain(int64_t tag) {
  const auto dtype = static_cast<c10::ScalarType>(graph::dtype_of(tag));
  switch (graph::tag_of(tag)) {
    case Tag::kTensor:
      return dtype == c10::kFloat || dtype == c10::kDouble;
    case Tag::kNumber:
      return !c10::isComplexType(dtype);
    case Tag::kBool:  // a number, unlike a flag, that is a bool
      return (graph::flags_of(tag) & graph::kValueFlag) == 0;
    case Tag::kComplex:
      return false;
    default:
      return true;
  }
}

// The operator and the tags of its arguments; empty: it need not, or must not, be asked for them.
std::vector<int64_t> types_of(std::span<const int64_t> signature, bool pointwise) {
  std::vector<int64_t> types{signature[0]};
  bool plain = true;
  std::optional<c10::ScalarType> first;
  bool mixed = false;
  bool integers = false;
  for (auto rest = signature.subspan(2); !rest.empty();) {
    types.push_back(rest[0]);
    plain &= is_plain(rest[0]);
    if (graph::tag_of(rest[0]) == Tag::kTensor) {
      const auto dtype = static_cast<c10::ScalarType>(graph::dtype_of(rest[0]));
      mixed |= dtype != first.value_or(dtype);
      integers |= c10::isIntegralType(dtype, /*includeBool=*/true);
      first = dtype;
    }
    rest = rest.subspan(graph::tag_of(rest[0]) == Tag::kList ? 1 : graph::item_words(rest.data()));
  }
  // Integers beside fractions are positions, pivots, lengths, which not every kernel checks.
  const bool unsafe = mixed && integers && !pointwise;
  if (unsafe || (plain && !mixed)) types.clear();
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

c10::DeviceIndex device_of(c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  return record::device_of(stack, stack.size());
}

// Whether the kernel ends without an error.
bool runs(const graph::Op& op, const c10::OperatorHandle& handle,
          c10::ArrayRef<c10::IValue> arguments) {
  // As the runner calls it.
  c10::impl::ForceDispatchKeyGuard clean(
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const runtime::OnDevice on_device(device_of(arguments));
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
  const std::lock_guard lock(mutex);
  if (known().size() >= kMaxKnown) known().clear();
  known().insert(std::move(types));
}

}  // namespace

bool takes_types(std::span<const int64_t> signature, const graph::Op& op,
                 const c10::OperatorHandle& handle, c10::ArrayRef<c10::IValue> arguments,
                 uint64_t result_bytes) {
  std::vector<int64_t> types = types_of(signature, op.pointwise);
  if (types.empty()) return true;
  if (!op.name.starts_with("aten::") || !op.mergeable) return true;
  // It takes what the forward operator made, workspaces of its own among it.
  if (op.name.find("_backward") != std::string::npos) return true;
  {
    const std::lock_guard lock(mutex);
    if (known().contains(types)) return true;
  }
  size_t bytes = result_bytes;
  for (const c10::IValue& argument : arguments) bytes += bytes_of(argument);
  if (bytes > kMaxBytes) return true;
  if (!runs(op, handle, arguments)) {
    doubted = std::move(types);
    return false;
  }
  believe(std::move(types));
  return true;
}

Doubt take_doubt() { return std::exchange(doubted, {}); }

void dismiss(const Doubt& doubt) {
  if (!doubt.empty()) believe(doubt);
}

}  // namespace acc::record
