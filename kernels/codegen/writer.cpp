#include "kernels/codegen/host_writer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "csrc/base/hash.h"
#include "kernels/codegen/host_math.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;
namespace dtype = graph::dtype;

// The type of elements in memory, in host_preamble.
const char* element_of(uint8_t type) {
  switch (type) {
    case dtype::kU8:
      return "u8";
    case dtype::kI8:
      return "i8";
    case dtype::kI16:
      return "i16";
    case dtype::kI32:
      return "i32";
    case dtype::kI64:
      return "i64";
    case dtype::kF16:
      return "f16";
    case dtype::kBF16:
      return "bf16";
    case dtype::kF32:
      return "f32";
    case dtype::kF64:
      return "f64";
    case dtype::kBool:
      return "bool8";
    default:
      ACC_FAIL();
  }
}

// What a function is in C++; the rest are calls of host_preamble's overloads.
const char* infix(Fn fn) {
  switch (fn) {
    case Fn::kAdd:
      return " + ";
    case Fn::kSub:
      return " - ";
    case Fn::kMul:
      return " * ";
    case Fn::kDiv:
      return " / ";
    case Fn::kAnd:
      return " & ";
    case Fn::kOr:
      return " | ";
    case Fn::kXor:
      return " ^ ";
    default:
      return nullptr;
  }
}

std::string number_text(double number, uint8_t type) {
  if (!dtype::is_floating(type)) return concat(static_cast<int64_t>(number));
  if (std::isnan(number)) return "__builtin_nan(\"\")";
  if (std::isinf(number)) return number > 0 ? "__builtin_inf()" : "-__builtin_inf()";
  char text[40];
  std::snprintf(text, sizeof text, "%a", number);
  return text;
}

bool is_host_math(const std::string& name) {
  static const std::vector<std::string>& names = *new std::vector(host_math_names());
  return std::ranges::binary_search(names, name);
}

}  // namespace

const char* vector_of(uint8_t type) {
  switch (type) {
    case dtype::kF32:
      return "F32";
    case dtype::kF64:
      return "F64";
    case dtype::kI32:
      return "I32";
    case dtype::kI64:
      return "I64";
    case dtype::kBool:
      return "Mask";
    default:
      ACC_FAIL();
  }
}

std::vector<bool> find_uniform(const KernelSpec& kernel) {
  std::vector<bool> uniform;
  for (const Instruction& instruction : kernel.instructions) {
    bool same = true;
    if (instruction.fn == Fn::kOperand) {
      same = kernel.operands[instruction.index].walk == Walk::kBroadcast;
    } else if (instruction.fn == Fn::kPosition) {
      same = kernel.positions[instruction.index].walk == Walk::kBroadcast;
    }
    for (int i = 0; i < graph::arity(instruction.fn); ++i) {
      same = same && uniform[instruction.inputs[static_cast<size_t>(i)]];
    }
    uniform.push_back(same);
  }
  return uniform;
}

HostWriter::HostWriter(const KernelSpec& kernel, size_t vectors)
    : kernel_(kernel), uniform_(find_uniform(kernel)), vectors_(vectors) {}

KernelText HostWriter::finish() const {
  KernelText made;
  base::Hasher hasher;
  hasher.add(std::string_view(body_));
  const base::Hash128 hash = hasher.finish();
  char name[40];
  std::snprintf(name, sizeof name, "acc_%016llx%016llx", static_cast<unsigned long long>(hash.hi),
                static_cast<unsigned long long>(hash.lo));
  made.name = name;
  made.text = concat("extern \"C\" __attribute__((visibility(\"default\"))) void ", made.name,
                     "(char* const* pointers, const long* geometry, const long* numbers, "
                     "long begin, long end) {\n",
                     body_);
  return made;
}

std::string HostWriter::stride(size_t operand, size_t loop) const {
  return concat("geometry[", loops() * (operand + 1) + loop, "]");
}

std::string HostWriter::offset(size_t operand, size_t first, size_t last) const {
  std::string text;
  for (size_t loop = first; loop < last; ++loop) {
    text += concat(" + i", loop, " * ", stride(operand, loop));
  }
  return text;
}

std::string HostWriter::position_offset(size_t position, size_t first, size_t last) const {
  return offset(kernel_.operands.size() + position, first, last);
}

void HostWriter::open_position(size_t i, const std::string& begin) {
  const Walk walk = kernel_.positions[i].walk;
  line("long q", i, " = ", begin, ";");
  if (walk == Walk::kBroadcast) return;
  const std::string step = stride(kernel_.operands.size() + i, loops() - 1);
  line("const long t", i, " = ", walk == Walk::kContiguous ? "1" : step, ";");
}

void HostWriter::move_position(size_t i) {
  if (kernel_.positions[i].walk != Walk::kBroadcast) line("q", i, " += at * t", i, ";");
}

const char* HostWriter::element(size_t operand) const {
  return element_of(kernel_.operands[operand].dtype);
}

void HostWriter::add_steps() {
  for (size_t i = 0; i < kernel_.operands.size(); ++i) {
    if (kernel_.operands[i].walk != Walk::kStrided) continue;
    line("const long step", i, " = ", stride(i, loops() - 1), ";");
  }
}

std::string HostWriter::step_of(size_t operand) const {
  return kernel_.operands[operand].walk == Walk::kStrided ? concat("step", operand) : "1";
}

bool HostWriter::is_loaded(size_t operand) const {
  return std::ranges::any_of(kernel_.instructions, [&](const Instruction& instruction) {
    return instruction.fn == Fn::kOperand && instruction.index == operand;
  });
}

std::string HostWriter::turn() const { return vectors_ == 1 ? "W" : concat(vectors_, " * W"); }

std::string HostWriter::place() const {
  return vector_ == 0 ? "at" : concat("(at + ", vector_, " * W)");
}

std::string HostWriter::value(size_t i) const {
  return vector_ == 0 || uniform_[i] ? concat("v", i) : concat("v", i, "_", vector_);
}

void HostWriter::define(size_t i) {
  const Instruction& instruction = kernel_.instructions[i];
  line("const ", vector_of(instruction.dtype), " ", value(i), " = ", expression(instruction), ";");
}

std::string HostWriter::input(const Instruction& instruction, size_t i) const {
  return value(instruction.inputs[i]);
}

std::string HostWriter::expression(const Instruction& instruction) const {
  const std::string vector = vector_of(instruction.dtype);
  switch (instruction.fn) {
    case Fn::kOperand:
      return load(instruction.index);
    case Fn::kPosition:
      if (kernel_.positions[instruction.index].walk == Walk::kBroadcast) {
        return concat("splat_F32(q", instruction.index, ")");
      }
      return concat("count_F32(q", instruction.index, " + ", place(), " * t", instruction.index,
                    ", t", instruction.index, ")");
    case Fn::kScalar:
      return concat("splat_", vector, "(",
                    kernel_.scalars[instruction.index] ? "as_double(numbers[" : "(numbers[",
                    instruction.index, "]))");
    case Fn::kConstant:
      return concat("splat_", vector, "(", number_text(instruction.constant, instruction.dtype),
                    ")");
    case Fn::kCast:
      if (instruction.index != 0) {
        const char* half = element_of(static_cast<uint8_t>(instruction.index));
        return concat("from_", half, "(to_", half, "(", input(instruction, 0), "))");
      }
      return concat("cast_", vector_of(kernel_.instructions[instruction.inputs[0]].dtype), "_",
                    vector, "(", input(instruction, 0), ")");
    case Fn::kSelect:
      return concat("select(", input(instruction, 0), ", ", input(instruction, 1), ", ",
                    input(instruction, 2), ")");
    default:
      break;
  }
  if (const char* operation = infix(instruction.fn)) {
    return concat(input(instruction, 0), operation, input(instruction, 1));
  }
  const std::string name = graph::name_of(instruction.fn);
  const bool library = instruction.dtype == dtype::kF32 && is_host_math(name);
  std::string call = concat(name, library ? "_f32(" : "_(");
  for (int i = 0; i < graph::arity(instruction.fn); ++i) {
    call += concat(i == 0 ? "" : ", ", input(instruction, static_cast<size_t>(i)));
  }
  return call + ")";
}

std::string HostWriter::load(size_t i) const {
  switch (kernel_.operands[i].walk) {
    case Walk::kBroadcast:
      return concat("from_", element(i), "(spread(*p", i, "))");
    case Walk::kContiguous:
      return concat("from_", element(i), "(load(p", i, " + ", place(), "))");
    case Walk::kStrided:
      return concat("from_", element(i), "(gather(p", i, " + ", place(), " * s", i, ", s", i, "))");
  }
  ACC_FAIL();
}

void HostWriter::add_store(const Store& store) {
  const size_t i = store.operand;
  const std::string text = concat("to_", element(i), "(", value(store.value), ")");
  if (kernel_.operands[i].walk == Walk::kStrided) {
    line("scatter(p", i, " + ", place(), " * s", i, ", s", i, ", ", text, ");");
  } else {
    line("store(p", i, " + ", place(), ", ", text, ");");
  }
}

}  // namespace acc::codegen
