#include "kernels/codegen/writer.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string_view>

#include "csrc/base/hash.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;
namespace dtype = graph::dtype;

// The type of elements in memory, in the preambles.
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

// What a function is in C++; the rest are calls of the preambles' functions, and so is what can
// overflow: where integers have a sign, compilers take it that they never do.
const char* infix(Fn fn, uint8_t type) {
  switch (fn) {
    case Fn::kAdd:
      return dtype::is_floating(type) ? " + " : nullptr;
    case Fn::kSub:
      return dtype::is_floating(type) ? " - " : nullptr;
    case Fn::kMul:
      return dtype::is_floating(type) ? " * " : nullptr;
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
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "infinity" : "-infinity";
  char digits[40];  // of snprintf the program's locale would choose the point
  char* const end =
      std::to_chars(std::begin(digits), std::end(digits), std::fabs(number), std::chars_format::hex)
          .ptr;
  return concat(std::signbit(number) ? "-0x" : "0x", std::string_view(digits, end));
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
    } else if (has_position(instruction)) {
      same = kernel.positions[instruction.index].walk == Walk::kBroadcast;
    }
    for (int i = 0; i < graph::arity(instruction.fn); ++i) {
      same = same && uniform[instruction.inputs[static_cast<size_t>(i)]];
    }
    uniform.push_back(same);
  }
  return uniform;
}

Writer::Writer(const KernelSpec& kernel) : kernel_(kernel), uniform_(find_uniform(kernel)) {}

KernelText Writer::finish(const char* head, const char* tail) const {
  KernelText made;
  base::Hasher hasher;
  hasher.add(std::string_view(body_));
  const base::Hash128 hash = hasher.finish();
  char name[40];
  std::snprintf(name, sizeof name, "acc_%016llx%016llx", static_cast<unsigned long long>(hash.hi),
                static_cast<unsigned long long>(hash.lo));
  made.name = name;
  made.text = concat(head, made.name, tail, " {\n", body_);
  return made;
}

std::string Writer::stride(size_t operand, size_t loop) const {
  return concat("geometry[", loops() * (operand + 1) + loop, "]");
}

std::string Writer::offset(size_t operand, size_t first, size_t last) const {
  std::string text;
  for (size_t loop = first; loop < last; ++loop) {
    text += concat(" + i", loop, " * ", stride(operand, loop));
  }
  return text;
}

std::string Writer::position_offset(size_t position, size_t first, size_t last) const {
  return offset(kernel_.operands.size() + position, first, last);
}

const char* Writer::element(size_t operand) const {
  return element_of(kernel_.operands[operand].dtype);
}

bool Writer::is_loaded(size_t operand) const {
  return std::ranges::any_of(kernel_.instructions, [&](const Instruction& instruction) {
    return instruction.fn == Fn::kOperand && instruction.index == operand;
  });
}

bool Writer::is_constant(size_t i) const {
  const Instruction& instruction = kernel_.instructions[i];
  if (instruction.fn == Fn::kOperand || has_position(instruction)) return false;
  if (graph::is_reduction(instruction.fn)) return false;  // as often as there are elements
  for (int k = 0; k < graph::arity(instruction.fn); ++k) {
    if (!is_constant(instruction.inputs[static_cast<size_t>(k)])) return false;
  }
  return true;
}

void Writer::define(size_t i) {
  const Instruction& instruction = kernel_.instructions[i];
  line("const ", vector_of(instruction.dtype), " ", value(i), " = ", expression(i), ";");
}

std::string Writer::neutral(const Instruction& reduction) {
  const bool amax = reduction.fn == Fn::kAmax;
  if (dtype::is_floating(reduction.dtype)) return amax ? "-infinity" : "infinity";
  const char* most = reduction.dtype == dtype::kI32 ? "0x7fffffff" : "0x7fffffffffffffff";
  return amax ? concat("(-", most, " - 1)") : most;
}

std::string Writer::value(size_t i) const { return concat("v", i); }

std::string Writer::input(const Instruction& instruction, size_t i) const {
  return value(instruction.inputs[i]);
}

std::string Writer::number(size_t i) const {
  return concat("numbers[", kernel_.instructions[i].index, "]");
}

std::string Writer::stream(size_t i) const {
  const auto& inputs = kernel_.instructions[i].inputs;
  return concat(number(inputs[0]), ", ", number(inputs[1]));
}

std::string Writer::bound(size_t i) const {
  const Instruction& instruction = kernel_.instructions[i];
  return graph::arity(instruction.fn) == 3 ? concat(", ", number(instruction.inputs[2])) : "";
}

std::string Writer::expression(size_t i) const {
  const Instruction& instruction = kernel_.instructions[i];
  const std::string vector = vector_of(instruction.dtype);
  switch (instruction.fn) {
    case Fn::kOperand:
      return load(instruction.index);
    case Fn::kPosition:
      return count(instruction.index);
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
    case Fn::kDrawn:
    case Fn::kUniform:
    case Fn::kExponential:
    case Fn::kNormal:
    case Fn::kInteger:
      return drawn(i);
    case Fn::kSelect:
      return concat("select(", input(instruction, 0), ", ", input(instruction, 1), ", ",
                    input(instruction, 2), ")");
    default:
      break;
  }
  if (const char* operation = infix(instruction.fn, instruction.dtype)) {
    return concat(input(instruction, 0), operation, input(instruction, 1));
  }
  std::string call = name_of(instruction.fn, instruction.dtype) + "(";
  for (int k = 0; k < graph::arity(instruction.fn); ++k) {
    call += concat(k == 0 ? "" : ", ", input(instruction, static_cast<size_t>(k)));
  }
  return call + ")";
}

}  // namespace acc::codegen
