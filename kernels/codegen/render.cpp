#include "kernels/codegen/render.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"
#include "kernels/codegen/host_math.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;
namespace dtype = graph::dtype;

// The vector type of values of a type that kernels compute in; masks are as wide as float32.
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
      return "b8";
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

// Whether a value is the same at every turn of the innermost loop.
std::vector<bool> find_uniform(const KernelSpec& kernel) {
  std::vector<bool> uniform;
  for (const Instruction& instruction : kernel.instructions) {
    bool same = true;
    if (instruction.fn == Fn::kOperand) {
      same = kernel.operands[instruction.index].walk == Walk::kBroadcast;
    }
    for (int i = 0; i < graph::arity(instruction.fn); ++i) {
      same = same && uniform[instruction.inputs[static_cast<size_t>(i)]];
    }
    uniform.push_back(same);
  }
  return uniform;
}

bool is_host_math(const std::string& name) {
  static const std::vector<std::string>& names = *new std::vector(host_math_names());
  return std::ranges::binary_search(names, name);
}

class HostRenderer {
 public:
  explicit HostRenderer(const KernelSpec& kernel)
      : kernel_(kernel), uniform_(find_uniform(kernel)) {}

  KernelText run() {
    open_function();
    open_row();
    // The rest of a row, shorter than a vector, goes through the same loop in buffers.
    line("long at = column;");
    line("for (bool rest = false;; rest = true) {");
    line("for (; at + W <= stop; at += W) {");
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (!uniform_[i]) define(i);
    }
    for (const Store& store : kernel_.stores) add_store(store);
    line("}");
    close_row();
    line("}");
    line("}");
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

 private:
  template <class... Parts>
  void line(const Parts&... parts) {
    body_ += concat(parts..., "\n");
  }

  size_t loops() const { return kernel_.loops; }
  std::string stride(size_t operand, size_t loop) const {
    return concat("geometry[", loops() * (operand + 1) + loop, "]");
  }
  std::string element(size_t operand) const { return element_of(kernel_.operands[operand].dtype); }

  void open_function() {
    line("int count = 0;");
    line("const long columns = geometry[", loops() - 1, "];");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      if (kernel_.operands[i].walk == Walk::kStrided) {
        line("const long step", i, " = ", stride(i, loops() - 1), ";");
      }
    }
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (is_constant(i)) define(i);
    }
    line("long row = begin / columns, column = begin % columns;");
    for (size_t loop = loops() - 1; loop-- > 0;) {
      line("long i", loop, " = row % geometry[", loop, "]; row /= geometry[", loop, "];");
    }
    line("while (begin < end) {");
  }

  // The same in all rows: made of numbers only.
  bool is_constant(size_t i) const {
    const Instruction& instruction = kernel_.instructions[i];
    if (instruction.fn == Fn::kOperand) return false;
    for (int k = 0; k < graph::arity(instruction.fn); ++k) {
      if (!is_constant(instruction.inputs[static_cast<size_t>(k)])) return false;
    }
    return true;
  }

  void open_row() {
    line("long stop = column + (end - begin);");
    line("if (stop > columns) stop = columns;");
    line("begin += stop - column;");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      std::string offset;
      for (size_t loop = 0; loop + 1 < loops(); ++loop) {
        offset += concat(" + i", loop, " * ", stride(i, loop));
      }
      line(element(i), "* p", i, " = (", element(i), "*)pointers[", i, "]", offset, ";");
      if (kernel_.operands[i].walk == Walk::kStrided) line("long s", i, " = step", i, ";");
      if (kernel_.operands[i].walk != Walk::kBroadcast) {
        line(element(i), " rest", i, "[W], *back", i, " = 0;");
      }
    }
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (uniform_[i] && !is_constant(i)) define(i);
    }
  }

  // After the whole vectors of a row: once more with what is left, then on to the next row.
  void close_row() {
    line("const int left = (int)(stop - at);");
    line("if (rest) {");
    for (const Store& store : kernel_.stores) {
      line("put_rest(back", store.operand, ", ", step_of(store.operand), ", rest", store.operand,
           ", count);");
    }
    line("break;");
    line("}");
    line("if (left == 0) break;");
    line("count = left;");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      const Operand& operand = kernel_.operands[i];
      if (operand.walk == Walk::kBroadcast) continue;
      const bool strided = operand.walk == Walk::kStrided;
      line("back", i, " = p", i, " + at", strided ? concat(" * s", i) : std::string(), ";");
      if (is_loaded(i)) {
        line("take_rest(back", i, ", ", step_of(i), ", rest", i, ", left);");
      }
      line("p", i, " = rest", i, ";", strided ? concat(" s", i, " = 1;") : std::string());
    }
    line("at = 0; stop = W;");
    line("}");
    line("column = 0;");
    for (size_t loop = loops() - 1; loop-- > 0;) {
      line("if (++i", loop, " < geometry[", loop, "]) continue;");
      line("i", loop, " = 0;");
    }
  }

  std::string step_of(size_t operand) const {
    return kernel_.operands[operand].walk == Walk::kStrided ? concat("step", operand) : "1";
  }

  bool is_loaded(size_t operand) const {
    return std::ranges::any_of(kernel_.instructions, [&](const Instruction& instruction) {
      return instruction.fn == Fn::kOperand && instruction.index == operand;
    });
  }

  void define(size_t i) {
    const Instruction& instruction = kernel_.instructions[i];
    line("const ", vector_of(instruction.dtype), " v", i, " = ", expression(instruction), ";");
  }

  std::string input(const Instruction& instruction, size_t i) const {
    return concat("v", instruction.inputs[i]);
  }

  std::string expression(const Instruction& instruction) const {
    const std::string vector = vector_of(instruction.dtype);
    switch (instruction.fn) {
      case Fn::kOperand:
        return load(instruction.index);
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

  std::string load(size_t i) const {
    switch (kernel_.operands[i].walk) {
      case Walk::kBroadcast:
        return concat("from_", element(i), "(spread(*p", i, "))");
      case Walk::kContiguous:
        return concat("from_", element(i), "(load(p", i, " + at))");
      case Walk::kStrided:
        return concat("from_", element(i), "(gather(p", i, " + at * s", i, ", s", i, "))");
    }
    ACC_FAIL();
  }

  void add_store(const Store& store) {
    const size_t i = store.operand;
    const std::string value = concat("to_", element(i), "(v", store.value, ")");
    if (kernel_.operands[i].walk == Walk::kStrided) {
      line("scatter(p", i, " + at * s", i, ", s", i, ", ", value, ");");
    } else {
      line("store(p", i, " + at, ", value, ");");
    }
  }

  const KernelSpec& kernel_;
  const std::vector<bool> uniform_;
  std::string body_;
};

}  // namespace

KernelText render_host(const KernelSpec& kernel) { return HostRenderer(kernel).run(); }

}  // namespace acc::codegen
