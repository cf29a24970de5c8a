#include "lazy/record/infer.h"

#include <ATen/record_function.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "csrc/base/hash.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/gil.h"
#include "lazy/graph/words.h"
#include "lazy/record/stand_ins.h"
#include "lazy/record/storage.h"
#include "lazy/record/types.h"

namespace acc::record {
namespace {

using base::count;
using base::Counter;

struct WordsHash {
  using is_transparent = void;
  size_t operator()(std::span<const int64_t> words) const {
    return base::hash64(reinterpret_cast<const uint64_t*>(words.data()), words.size());
  }
};
struct WordsEqual {
  using is_transparent = void;
  bool operator()(std::span<const int64_t> a, std::span<const int64_t> b) const {
    return std::ranges::equal(a, b);
  }
};
using Memo = std::unordered_map<std::vector<int64_t>, std::shared_ptr<const Inference>, WordsHash,
                                WordsEqual>;

// A program whose shapes never repeat must not grow the table without end; when it is full it
// starts afresh, which costs the current shapes one Meta call each.
constexpr size_t kMaxSignatures = 100'000;

// Never destroyed, as what follows: threads may still record while the process ends.
std::mutex memo_mutex;
Memo& memo() {
  static auto& table = *new Memo;
  return table;
}

std::unordered_map<std::string, MetaRule>& meta_rules() {
  static auto& rules = *new std::unordered_map<std::string, MetaRule>;
  return rules;
}

thread_local bool inside_meta = false;

std::unordered_map<std::string, MetaKernel>& meta_kernels() {
  static auto& kernels = *new std::unordered_map<std::string, MetaKernel>;
  return kernels;
}

void call_meta(const graph::Op& op, const c10::OperatorHandle& handle, torch::jit::Stack& stack);

// A call on lists is known when that on each item is. False: it has to be asked as a whole.
bool call_meta_by_item(const graph::Op& op, torch::jit::Stack& stack) {
  if (op.item == nullptr) return false;
  std::optional<size_t> items;
  for (const c10::IValue& argument : stack) {
    if (!argument.isList()) continue;
    const size_t n = argument.toListRef().size();
    if (items.value_or(n) != n) return false;
    items = n;
  }
  const bool number = op.item_with_number != nullptr;
  const graph::Op& item_op = number ? *op.item_with_number : *op.item;
  const auto& handle = *static_cast<const c10::OperatorHandle*>(item_op.handle);
  c10::List<at::Tensor> results;
  for (size_t i = 0; i < items.value_or(0); ++i) {
    torch::jit::Stack call;
    for (const graph::Op::ItemArgument& from : op.item_arguments) {
      if (from.from < 0) {
        call.push_back(handle.schema().arguments()[call.size()].default_value().value());
        continue;
      }
      const c10::IValue& argument = stack[static_cast<size_t>(from.from)];
      c10::IValue item = argument.isList() ? argument.toListRef()[i] : argument;
      if (number && item.isScalar()) {
        item = at::native::wrapped_scalar_tensor(item.toScalar());
      }
      call.push_back(std::move(item));
    }
    call_meta(item_op, handle, call);
    if (!op.returns.empty()) results.push_back(call.front().toTensor());
  }
  stack.clear();
  if (!op.returns.empty()) stack.emplace_back(std::move(results));
  return true;
}

// Whether a kernel of our own knew the results.
bool call_own_meta(const std::string& name, const c10::OperatorHandle& handle,
                   torch::jit::Stack& stack) {
  const auto own = meta_kernels().find(name);
  if (own == meta_kernels().end() || !own->second.applies(stack)) return false;
  own->second.kernel.callBoxed(handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  return true;
}

// What an in-place operator, or one with an out= argument, computes: the overload that takes its
// first `n` arguments and returns a fresh tensor. Nothing: there is none.
std::optional<c10::OperatorHandle> functional_form(const c10::FunctionSchema& schema, size_t n) {
  std::string name = schema.name();
  std::string overload = schema.overload_name();
  const bool out = n < schema.arguments().size();
  if (out && overload.ends_with("_out")) overload.resize(overload.size() - 4);
  if (out && overload == "out") overload.clear();
  if (!out) name.pop_back();
  // `mul.out` and `pow_.Scalar` write what `mul.Tensor` and `pow.Tensor_Scalar` compute.
  for (const std::string& candidate : {overload, std::string("Tensor"), "Tensor_" + overload}) {
    const auto found = c10::Dispatcher::singleton().findSchema({name, candidate});
    if (!found.has_value() || found->schema().is_mutable()) continue;
    const auto& arguments = found->schema().arguments();
    if (arguments.size() == n && found->schema().returns().size() == 1 &&
        std::equal(arguments.begin(), arguments.end(), schema.arguments().begin(),
                   [](const c10::Argument& a, const c10::Argument& b) {
                     return a.name() == b.name() && *a.type() == *b.type();
                   })) {
      return found;
    }
  }
  return std::nullopt;
}

// A call that writes into the tensor it returns, which has the geometry of the functional form's
// result. False: it is no such call, the two differ, or a kernel of our own does not know.
bool call_meta_by_functional_form(const graph::Op& op, const c10::OperatorHandle& handle,
                                  torch::jit::Stack& stack) {
  if (!op.writes || op.returns.size() != 1 || op.returns[0].alias < 0) return false;
  const auto written = static_cast<size_t>(op.returns[0].alias);
  const bool out = op.arguments[written].out && written + 1 == stack.size();
  const bool in_place = written == 0 && handle.schema().name().ends_with('_');
  if ((!out && !in_place) || !stack[written].isTensor()) return false;
  const size_t n = stack.size() - (out ? 1 : 0);
  const auto functional = functional_form(handle.schema(), n);
  if (!functional.has_value()) return false;
  torch::jit::Stack results(stack.begin(), stack.begin() + static_cast<std::ptrdiff_t>(n));
  if (!call_own_meta(c10::toString(functional->operator_name()), *functional, results)) {
    return false;
  }
  const at::Tensor& result = results[0].toTensor();
  const at::Tensor& tensor = stack[written].toTensor();
  // ATen's iterator casts what it writes; other kernels want the type of their result.
  const bool fits = op.pointwise ? c10::canCast(result.scalar_type(), tensor.scalar_type())
                                 : result.scalar_type() == tensor.scalar_type();
  if (!fits || result.sizes() != tensor.sizes()) return false;
  stack = {tensor};
  return true;
}

void call_meta(const graph::Op& op, const c10::OperatorHandle& handle, torch::jit::Stack& stack) {
  if (call_meta_by_item(op, stack) || call_own_meta(op.name, handle, stack) ||
      call_meta_by_functional_form(op, handle, stack)) {
    return;
  }
  handle.callBoxed(stack);
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  // CPU tensors of no dimension keep their rank in type promotion only as CPU tensors.
  if (!runtime::on_acc(tensor) && tensor.dim() == 0) return tensor;
  at::Tensor meta =
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  copy_flags(tensor, meta);
  return meta;
}

void append_result(const at::Tensor& tensor, Inference* inference) {
  std::vector<int64_t>* words = &inference->results;
  if (!tensor.defined()) {
    words->push_back(graph::make_tag(graph::Tag::kUndefined));
    return;
  }
  inference->largest = std::max(inference->largest,
                                at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                                 tensor.dtype().itemsize()));
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  words->push_back(graph::make_tag(graph::Tag::kTensor, static_cast<uint8_t>(tensor.scalar_type()),
                                   0, sizes.size()));
  words->push_back(0);
  words->push_back(0);
  words->insert(words->end(), sizes.begin(), sizes.end());
  words->insert(words->end(), strides.begin(), strides.end());
}

// Some kernels check the types of their operands where Meta does not: products want one type,
// others integers. A direct call then says so at the line.
bool wrong_types(const graph::Op& op, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::ScalarType> first;
  int factors = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const c10::ScalarType type = arguments[i].toTensor().scalar_type();
    if (op.arguments[i].integers && !c10::isIntegralType(type, /*includeBool=*/true)) return true;
    // The two factors come first; workspaces and masks, of other types, come later.
    if (op.precision_sensitive && ++factors == 2 && type != *first) return true;
    if (!first.has_value()) first = type;
  }
  return false;
}

// Whether an in-place call computes in a type that its tensor cannot hold, such as a quotient of
// integers. The operator's functional form tells the type.
bool loses_type(const graph::Op& op, const c10::OperatorHandle& handle,
                c10::ArrayRef<c10::IValue> arguments, const torch::jit::Stack& metas) {
  const c10::FunctionSchema& schema = handle.schema();
  if (!op.writes || !schema.name().ends_with('_') || !arguments[0].isTensor()) return false;
  const c10::ScalarType own = arguments[0].toTensor().scalar_type();
  const bool plain =
      c10::isFloatingType(own) && std::ranges::all_of(arguments, [&](const c10::IValue& argument) {
        return !argument.isTensor() || !argument.toTensor().defined() ||
               argument.toTensor().scalar_type() == own;
      });
  if (plain) return false;
  const auto functional = functional_form(schema, arguments.size());
  if (!functional.has_value()) return false;
  torch::jit::Stack stack = metas;
  try {
    if (!call_own_meta(c10::toString(functional->operator_name()), *functional, stack)) {
      functional->callBoxed(stack);
    }
  } catch (const std::exception& error) {
    if (runtime::is_interrupt(error)) throw;
    return false;  // the call itself is next and tells
  }
  return stack.size() == 1 && stack[0].isTensor() &&
         !c10::canCast(stack[0].toTensor().scalar_type(), own);
}

// On the CPU, ATen's iterator begins with copies of the operands that are not of the type it
// computes in, and a copy of what is expanded or has gaps is laid out anew. Gives such operands the
// layout of their copies, and says whether there are any. `result`: what the Meta kernel made of
// the others.
bool promote_operands(const graph::Op& op, const c10::IValue& result, torch::jit::Stack* metas) {
  if (!op.pointwise || !runtime::on_host() || !result.isTensor() || !result.toTensor().defined()) {
    return false;
  }
  // They put two real numbers together, and convert none.
  if (op.name == "aten::complex" || op.name == "aten::polar") return false;
  c10::ScalarType common = result.toTensor().scalar_type();
  // A comparison computes in the type of its operands, and who gives a result has chosen its type.
  if (common == c10::kBool || op.writes) {
    at::native::ResultTypeState state;
    for (size_t i = 0; i < metas->size(); ++i) {
      const c10::IValue& value = (*metas)[i];
      if (value.isTensor() && value.toTensor().defined() && !op.arguments[i].writes) {
        state = at::native::update_result_type_state(value.toTensor(), state);
      } else if (value.isScalar() && op.arguments[i].name == "other") {
        const at::Tensor number = at::native::wrapped_scalar_tensor(value.toScalar());
        state = at::native::update_result_type_state(number, state);
      }
    }
    common = at::native::result_type(state);
  }
  bool any = false;
  for (size_t i = 0; i < metas->size(); ++i) {
    if (!(*metas)[i].isTensor() || op.arguments[i].writes) continue;
    const at::Tensor& operand = (*metas)[i].toTensor();
    const bool mask = op.arguments[i].name == "condition" || op.arguments[i].name == "mask";
    if (!operand.defined() || mask || operand.scalar_type() == common ||
        operand.is_non_overlapping_and_dense()) {
      continue;
    }
    const auto strides = at::infer_dense_strides(operand.sizes(), operand.strides());
    (*metas)[i] = at::detail::empty_strided_meta(operand.sizes(), strides, operand.scalar_type());
    any = true;
  }
  return any;
}

std::shared_ptr<const Inference> run_meta(const graph::Op& op, const c10::OperatorHandle& handle,
                                          c10::ArrayRef<c10::IValue> arguments) {
  auto inference = std::make_shared<Inference>();
  if (wrong_types(op, arguments)) {
    inference->recordable = false;
    return inference;
  }
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(stand_in(arguments[i], op.arguments[i].list, c10::DeviceType::Meta, &to_meta));
  }
  torch::jit::Stack metas = stack;
  bool promoted = false;
  {
    // The Meta kernel sees what it would see below autograd in a fresh thread: modes, transforms
    // and autocast of the caller have acted already.
    c10::impl::ForceDispatchKeyGuard clean(
        c10::default_included_set,
        c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    struct Inside {
      Inside() { inside_meta = true; }
      ~Inside() { inside_meta = false; }
    } inside;
    if (loses_type(op, handle, arguments, metas)) {
      inference->recordable = false;
      return inference;
    }
    call_meta(op, handle, stack);
    promoted = !stack.empty() && promote_operands(op, stack.front(), &metas);
    if (promoted) {
      stack = metas;
      call_meta(op, handle, stack);
    }
  }
  for (size_t i = 0; i < op.returns.size(); ++i) {
    const int alias = op.returns[i].alias;
    if (alias < 0) continue;
    const auto argument = static_cast<size_t>(alias);
    if (!arguments[argument].isTensor()) continue;
    const at::Tensor& given = arguments[argument].toTensor();
    const at::Tensor& meta = metas[argument].toTensor();
    if (given.sizes() != meta.sizes()) {
      if (!op.arguments[argument].out) {
        // Meta kernels resize what an in-place call would have to broadcast. Eager refuses it.
        inference->recordable = false;
        return inference;
      }
      // The out= arguments come last.
      const auto strides =
          op.pointwise
              ? pointwise_strides(c10::ArrayRef<c10::IValue>(metas).slice(0, metas.size() - 1))
              : meta.strides().vec();
      inference->resizes.push_back({static_cast<uint32_t>(argument), meta.sizes().vec(), strides});
    }
  }
  if (const auto rule = meta_rules().find(op.name); rule != meta_rules().end()) {
    if (!rule->second(promoted ? c10::ArrayRef<c10::IValue>(metas) : arguments, stack)) {
      inference->recordable = false;
      return inference;
    }
  }
  for (size_t i = 0; i < op.returns.size(); ++i) {
    if (op.returns[i].alias >= 0) continue;
    if (stack[i].isTensor() && (stack[i].toTensor().is_conj() || stack[i].toTensor().is_neg())) {
      // The kernel leaves the conjugation to whoever reads its result; a direct call does it.
      inference->recordable = false;
      return inference;
    }
    if (op.returns[i].list) {
      const auto items = stack[i].toListRef();
      inference->results.push_back(graph::make_tag(graph::Tag::kList, 0, 0, items.size()));
      for (const c10::IValue& item : items) append_result(item.toTensor(), inference.get());
    } else {
      append_result(stack[i].toTensor(), inference.get());
    }
  }
  return inference;
}

}  // namespace

std::shared_ptr<const Inference> infer(std::span<const int64_t> signature, const graph::Op& op,
                                       const c10::OperatorHandle& handle,
                                       c10::ArrayRef<c10::IValue> arguments) {
  {
    std::lock_guard lock(memo_mutex);
    if (const auto found = memo().find(signature); found != memo().end()) {
      count(Counter::MemoHits);
      return found->second;
    }
  }
  count(Counter::MemoMisses);
  // What is asked here is nothing that the program called.
  const at::RecordFunctionGuard unseen(false);
  const auto direct = [] {
    auto inference = std::make_shared<Inference>();
    inference->recordable = false;
    return inference;
  };
  std::shared_ptr<const Inference> inference;
  // What a Meta kernel says under other settings than the call's, those of another thread's plan or
  // what the program has changed meanwhile, must not be remembered.
  constexpr int kAttempts = 3;
  bool certain = false;
  for (int attempt = 0; !certain && attempt < kAttempts; ++attempt) {
    runtime::await_program_settings();
    const uint64_t epoch = runtime::ambient_epoch();
    try {
      inference = run_meta(op, handle, arguments);
    } catch (const c10::NotImplementedError&) {
      inference = direct();
    } catch (const std::exception& error) {
      if (runtime::is_interrupt(error)) throw;
      // Wrong arguments, or a result whose shape depends on data. The direct call tells them apart,
      // with the message that eager gives; it is not remembered, since it may end differently.
      return direct();
    }
    const auto wanted = static_cast<uint64_t>(signature[1]);
    certain = epoch % 2 == 0 && runtime::ambient_word(op.precision_sensitive) == wanted &&
              runtime::ambient_epoch() == epoch;
  }
  if (!certain) return direct();
  if (inference->recordable && inference->resizes.empty() &&
      !takes_types(signature, op, handle, arguments, inference->largest)) {
    return direct();
  }
  std::lock_guard lock(memo_mutex);
  if (memo().size() >= kMaxSignatures) memo().clear();
  memo().emplace(std::vector<int64_t>(signature.begin(), signature.end()), inference);
  return inference;
}

void install_meta_rule(const std::string& op_name, MetaRule rule) { meta_rules()[op_name] = rule; }

bool inferring() { return inside_meta; }

std::vector<int64_t> pointwise_strides(c10::ArrayRef<c10::IValue> arguments) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false);
  config.declare_static_dtype_and_device(c10::kFloat, c10::Device(c10::DeviceType::Meta));
  config.add_owned_output(at::Tensor());
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor& tensor = argument.toTensor();
    config.add_owned_input(
        at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  }
  return config.build().output(0).strides().vec();
}

std::vector<int64_t> strides_of_copy(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense()
             ? tensor.strides().vec()
             : at::infer_dense_strides(tensor.sizes(), tensor.strides());
}

void install_meta_kernel(const std::string& op_name, MetaKernel kernel) {
  meta_kernels()[op_name] = std::move(kernel);
}

void resize_result(const at::Tensor& out, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::native::resize_output(out, sizes);
  if (out.strides() != strides) {
    out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  }
}

void forget_inferences() {
  std::lock_guard lock(memo_mutex);
  memo().clear();
}

}  // namespace acc::record
