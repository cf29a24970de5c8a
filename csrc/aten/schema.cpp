#include "csrc/aten/schema.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "csrc/base/hash.h"
#include "csrc/runtime/backend.h"
#include "lazy/graph/op_table.h"
#include "lazy/graph/words.h"

namespace acc::aten {
namespace {

using c10::DispatchKey;
using c10::TypeKind;

// None of these is ever destroyed: threads may still call operators while the process ends.
std::deque<graph::Op>& ops() {
  static auto& all = *new std::deque<graph::Op>;
  return all;
}
std::deque<c10::OperatorHandle>& handles() {
  static auto& all = *new std::deque<c10::OperatorHandle>;
  return all;
}

const c10::Type& element(const c10::Type& type) { return *type.containedType(0); }

// The argument's type without `Optional`.
const c10::Type& plain(const c10::Type& type) {
  return type.kind() == TypeKind::OptionalType ? element(type) : type;
}

bool is_tensor(const c10::Type& type) { return plain(type).kind() == TypeKind::TensorType; }

graph::ListOf list_of(const c10::Type& type) {
  const c10::Type& list = plain(type);
  if (list.kind() != TypeKind::ListType) return graph::ListOf::kNone;
  const c10::Type& item = element(list);
  switch (item.kind()) {
    case TypeKind::TensorType:
      return graph::ListOf::kTensor;
    case TypeKind::OptionalType:
      return element(item).kind() == TypeKind::TensorType ? graph::ListOf::kOptionalTensor
                                                          : graph::ListOf::kNone;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return graph::ListOf::kInt;
    case TypeKind::FloatType:
      return graph::ListOf::kFloat;
    case TypeKind::BoolType:
      return graph::ListOf::kBool;
    case TypeKind::NumberType:
      return graph::ListOf::kScalar;
    case TypeKind::StringType:
      return graph::ListOf::kString;
    default:
      return graph::ListOf::kNone;
  }
}

// Scalars and single floats change from step to step (learning rates, scales, counters); integers,
// flags and lists of floats (scale factors) are structure.
graph::Role role_of(const std::string& op, const c10::Argument& argument) {
  if (graph::table::is_structure(op, argument.name())) return graph::Role::kStructure;
  const c10::Type& type = plain(*argument.type());
  const bool number = type.kind() == TypeKind::NumberType || type.kind() == TypeKind::FloatType ||
                      list_of(type) == graph::ListOf::kScalar;
  if (number) return graph::Role::kValue;
  // Our own random operators': seeds and offsets differ from run to run, ranges may.
  static constexpr std::array kDrawn{"seed", "offset", "below", "from", "count"};
  const bool drawn = op.starts_with("acc::") && type.kind() == TypeKind::IntType &&
                     std::ranges::find(kDrawn, argument.name()) != kDrawn.end();
  return drawn ? graph::Role::kWide : graph::Role::kStructure;
}

DispatchKey backend_key() { return runtime::on_host() ? DispatchKey::CPU : DispatchKey::CUDA; }

// The overload that takes the same arguments and an `out`, when the backend has a kernel for it.
const c10::OperatorHandle* find_out(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  if (schema.returns().size() != 1 || !is_tensor(*schema.returns()[0].type()) ||
      schema.returns()[0].alias_info() != nullptr || graph::table::avoid_out(schema.name())) {
    return nullptr;
  }
  // With a reduction, out kernels first give their result the unreduced size.
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == "reduction") return nullptr;
  }
  const std::string& overload = schema.overload_name();
  for (const std::string& candidate :
       {overload.empty() ? std::string("out") : overload + "_out", std::string("out")}) {
    const auto out = c10::Dispatcher::singleton().findSchema({schema.name(), candidate});
    if (!out.has_value() || !out->hasKernelForDispatchKey(backend_key())) continue;
    const auto& arguments = out->schema().arguments();
    if (arguments.size() != schema.arguments().size() + 1) continue;
    bool same = true;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      same &= arguments[i].name() == schema.arguments()[i].name() &&
              *arguments[i].type() == *schema.arguments()[i].type();
    }
    if (same) return &handles().emplace_back(*out);
  }
  return nullptr;
}

// The type that one item of a list of tensors or numbers has; other types are their own.
const c10::Type& item_type(const c10::Type& type) {
  const graph::ListOf list = list_of(type);
  const bool items = list == graph::ListOf::kTensor || list == graph::ListOf::kScalar;
  return items ? element(plain(type)) : type;
}

// The words of an argument's default; empty for others than integers, truths and None.
std::vector<int64_t> default_words(const c10::Argument& argument) {
  if (!argument.default_value().has_value()) return {};
  const c10::IValue& value = *argument.default_value();
  if (value.isNone()) return {graph::make_tag(graph::Tag::kNone)};
  if (value.isBool()) return {graph::make_tag(graph::Tag::kBool), value.toBool() ? 1 : 0};
  if (value.isInt()) return {graph::make_tag(graph::Tag::kInt), value.toInt()};
  return {};
}

// The overload that does to one item what `handle` does to lists. It may have more arguments: some
// with a default (alpha = 1), and an `out`.
std::optional<c10::OperatorHandle> find_item(const c10::OperatorHandle& handle, graph::Op* op) {
  const c10::FunctionSchema& schema = handle.schema();
  const std::string name = graph::table::item_operator(schema.name());
  if (name.empty()) return std::nullopt;
  const auto find = [&](const std::string& from,
                        const char* overload) -> std::optional<c10::OperatorHandle> {
    const auto item = c10::Dispatcher::singleton().findSchema({from, overload});
    if (!item.has_value()) return std::nullopt;
    const auto& arguments = item->schema().arguments();
    const auto& lists = schema.arguments();
    op->item_arguments.clear();
    size_t next = 0;  // of the lists' arguments
    for (const c10::Argument& argument : arguments) {
      if (argument.is_out()) {
        op->item_arguments.push_back({0, {}});
      } else if (next < lists.size() && *argument.type() == item_type(*lists[next].type())) {
        op->item_arguments.push_back({static_cast<int32_t>(next++), {}});
      } else if (std::vector<int64_t> words = default_words(argument); !words.empty()) {
        op->item_arguments.push_back({-1, std::move(words)});
      } else {
        return std::nullopt;
      }
    }
    if (next != lists.size()) return std::nullopt;
    return item;
  };
  for (const char* overload : {"", "Tensor", "Scalar", "Tensor_Scalar", "Tensor_Tensor"}) {
    if (const auto item = find(name, overload)) return item;
  }
  // Some operators have no form in place ("maximum").
  if (!name.ends_with('_')) return std::nullopt;
  return find(name.substr(0, name.size() - 1), "out");
}

const graph::Op* find_or_make_op(const c10::OperatorHandle& handle);

}  // namespace

bool is_recordable(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  if (graph::table::runs_directly(schema.name())) return false;
  // With a kernel of the backend beside the decomposition (silu_backward), eager runs the kernel;
  // recording it keeps gradients only where autograd knows the operator itself.
  if (handle.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
      !(handle.hasKernelForDispatchKey(backend_key()) &&
        handle.hasKernelForDispatchKey(DispatchKey::Autograd))) {
    return false;
  }
  if (handle.hasKernelForDispatchKey(DispatchKey::PrivateUse1)) return false;
  // Random operators that PyTorch makes of others end in ours; recorded whole they would draw from
  // the generator of the device below.
  if (schema.name().starts_with("aten::") && handle.hasTag(at::Tag::nondeterministic_seeded) &&
      (handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
       handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional))) {
    return false;
  }
  if (!handle.hasKernelForDispatchKey(backend_key()) &&
      !handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
      !handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional)) {
    return false;
  }
  bool tensors = false;
  bool writes = false;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && !argument.alias_info()->isWrite()) return false;
    writes |= argument.alias_info() != nullptr;
    const auto kind = plain(*argument.type()).kind();
    if (kind == TypeKind::StorageType || kind == TypeKind::StreamObjType) return false;
    const graph::ListOf list = list_of(*argument.type());
    if (plain(*argument.type()).kind() == TypeKind::ListType && list == graph::ListOf::kNone) {
      return false;
    }
    tensors |= is_tensor(*argument.type()) || list == graph::ListOf::kTensor ||
               list == graph::ListOf::kOptionalTensor;
  }
  if (!tensors || (schema.returns().empty() && !writes)) return false;
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
    if (!is_tensor(*result.type()) && list_of(*result.type()) != graph::ListOf::kTensor) {
      return false;
    }
  }
  return true;
}

const graph::Op* make_op(const c10::OperatorHandle& handle) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  return find_or_make_op(handle);
}

namespace {

// Whether this processor has instructions for products of bfloat16, which ATen's kernels then use.
bool multiplies_bf16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

// PyTorch has left the tag out of some in-place forms, and of floor_divide.
bool is_pointwise(const c10::OperatorHandle& handle) {
  const c10::OperatorName& name = handle.operator_name();
  if (handle.hasTag(at::Tag::pointwise) || name.name.starts_with("aten::floor_divide")) return true;
  if (!name.name.ends_with('_')) return false;
  const auto functional = c10::Dispatcher::singleton().findSchema(
      {name.name.substr(0, name.name.size() - 1), name.overload_name});
  return functional.has_value() && functional->hasTag(at::Tag::pointwise);
}

// What the table says that it writes it writes in training.
const graph::Op* find_evaluating(const graph::Op& op, const c10::FunctionSchema& schema,
                                 uint32_t* training) {
  static auto& made_ops = *new std::deque<graph::Op>;
  graph::Op evaluating = op;
  evaluating.writes = false;
  bool differs = false;
  bool trains = false;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    graph::Argument& argument = evaluating.arguments[i];
    argument.writes = alias != nullptr && alias->isWrite();
    evaluating.writes |= argument.writes;
    differs |= argument.writes != op.arguments[i].writes;
    if (argument.name != "training") continue;
    trains = true;
    *training = static_cast<uint32_t>(i);
  }
  return differs && trains ? &made_ops.emplace_back(evaluating) : nullptr;
}

const graph::Op* find_or_make_op(const c10::OperatorHandle& handle) {
  static auto& made_ops = *new std::unordered_map<std::string, const graph::Op*>;
  const c10::FunctionSchema& schema = handle.schema();
  graph::Op op;
  op.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  if (const auto found = made_ops.find(op.name); found != made_ops.end()) return found->second;
  base::Hasher hasher;
  hasher.add(std::string_view(op.name));
  op.id = hasher.finish().lo;
  for (const c10::Argument& argument : schema.arguments()) {
    graph::Argument& made = op.arguments.emplace_back();
    made.name = argument.name();
    made.role = role_of(schema.name(), argument);
    made.list = list_of(*argument.type());
    made.writes = (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
                  graph::table::writes_undeclared(schema.name(), argument.name());
    made.out = argument.is_out();
    made.scales = made.name == "alpha";
    made.is_type = argument.real_type()->str().find("ScalarType") != std::string::npos;
    made.integers = graph::table::needs_integers(schema.name(), argument.name());
    made.cpu_ok = graph::table::takes_cpu_tensor(schema.name(), argument.name());
    made.reads_on_cpu = graph::table::reads_on_cpu(schema.name(), argument.name());
    made.checked = graph::table::must_fit(schema.name(), argument.name());
    op.writes |= made.writes;
  }
  for (const c10::Argument& result : schema.returns()) {
    graph::Return& made = op.returns.emplace_back();
    made.list = result.type()->kind() == TypeKind::ListType;
    if (result.alias_info() == nullptr) continue;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->beforeSet() == result.alias_info()->beforeSet()) {
        made.alias = static_cast<int>(i);
      }
    }
  }
  op.removable = !graph::table::must_run(schema.name()) && (op.writes || !op.returns.empty());
  op.mergeable = !handle.hasTag(at::Tag::nondeterministic_seeded);
  op.pointwise = is_pointwise(handle);
  op.precision_sensitive = graph::table::multiplies(schema.name());
  op.communicates = graph::table::communicates(schema.name());
  op.casts_numbers =
      graph::table::casts_numbers(schema.name()) && schema.overload_name() == "Tensor";
  op.handle = &handles().emplace_back(handle);
  op.out_handle = find_out(handle);
  if (const auto item = find_item(handle, &op)) {
    op.item = find_or_make_op(*item);
    const c10::OperatorName& name = item->operator_name();
    if (graph::table::casts_numbers(name.name) && name.overload_name == "Scalar") {
      op.item_with_number =
          find_or_make_op(*c10::Dispatcher::singleton().findSchema({name.name, "Tensor"}));
    }
  }
  if (graph::table::converts(schema.name())) {
    op.copy = find_or_make_op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
    op.convolves = graph::table::is_convolution(op.name);
    op.multiplies_bf16 = multiplies_bf16();
  }
  if (op.communicates) {
    op.await = find_or_make_op(c10::Dispatcher::singleton().findSchemaOrThrow("acc::await_", ""));
  }
  if (const std::string plus = graph::table::plus_operator(op.name); !plus.empty()) {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    op.plus = find_or_make_op(dispatcher.findSchemaOrThrow(plus.c_str(), ""));
    op.plus_in_place = find_or_make_op(dispatcher.findSchemaOrThrow((plus + "_").c_str(), ""));
  }
  if (graph::table::multiplies_matrices(op.name)) {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    op.cat = find_or_make_op(dispatcher.findSchemaOrThrow("aten::cat", ""));
    const c10::OperatorHandle linear = dispatcher.findSchemaOrThrow("acc::linear", "");
    if (linear.hasKernelForDispatchKey(backend_key())) op.linear = find_or_make_op(linear);
    const auto find = [&](const char* name) {
      return find_or_make_op(dispatcher.findSchemaOrThrow(name, ""));
    };
    if (op.name == "aten::addmm") {
      op.with_relu = find("aten::_addmm_activation");
      op.with_gelu = find("acc::addmm_gelu");
    } else {
      op.with_gelu_backward = find("acc::mm_gelu_backward");
      op.with_sum = find("acc::mm_and_sum");
    }
  }
  op.evaluates = find_evaluating(op, schema, &op.training);
  return made_ops[op.name] = &ops().emplace_back(op);
}

}  // namespace

std::vector<std::string> describe_ops() {
  std::vector<std::string> lines;
  for (const graph::Op& op : ops()) {
    std::ostringstream line;
    line << op.name << '(';
    for (size_t i = 0; i < op.arguments.size(); ++i) {
      const graph::Argument& argument = op.arguments[i];
      line << (i == 0 ? "" : ", ") << argument.name << (argument.writes ? "!" : "")
           << (argument.role == graph::Role::kStructure ? "" : "~");
    }
    line << ')' << (op.out_handle != nullptr ? " into" : "") << (op.removable ? "" : " must-run")
         << (op.communicates ? " communicates" : "") << (op.mergeable ? "" : " random")
         << (op.item != nullptr ? " by-item" : "") << (op.precision_sensitive ? " product" : "");
    lines.push_back(line.str());
  }
  std::ranges::sort(lines);
  return lines;
}

}  // namespace acc::aten
