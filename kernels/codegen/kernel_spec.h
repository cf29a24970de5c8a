#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lazy/graph/formula.h"

// What a generated kernel computes. It says nothing of sizes and addresses, which are arguments, so
// one kernel serves every shape, and equal computations are equal text.
namespace acc::codegen {

// How an operand goes with the turns of the innermost loop.
enum class Walk : uint8_t {
  kBroadcast,   // not at all
  kContiguous,  // from element to element
  kStrided,     // in steps that are an argument
};

struct Operand {
  uint8_t dtype = 0;  // see lazy/graph/dtype.h
  Walk walk = Walk::kContiguous;
  bool stored = false;
  bool kept = false;  // the same element at each turn of the reduced loops, of which there are some

  bool operator==(const Operand&) const = default;
};

// A count of how far the loops went, in strides as those of an operand: a value without memory.
struct Position {
  Walk walk = Walk::kContiguous;
  bool kept = false;

  bool operator==(const Position&) const = default;
};

// One value of the computation at an element; inputs are earlier instructions. Types are those that
// kernels compute in: f32, f64, i32, i64, bool.
struct Instruction {
  graph::Fn fn = graph::Fn::kConstant;
  uint8_t dtype = 0;  // of the value
  std::array<uint32_t, 3> inputs{};
  // kOperand, kScalar: which; kPosition, draws: of which position; kCast: the half type that it
  // rounds to, or 0
  uint32_t index = 0;
  double constant = 0;  // kConstant

  // The constant by its bits: -0.0 is not 0.0.
  bool operator==(const Instruction& other) const {
    return fn == other.fn && dtype == other.dtype && inputs == other.inputs &&
           index == other.index &&
           std::bit_cast<uint64_t>(constant) == std::bit_cast<uint64_t>(other.constant);
  }
};

constexpr bool has_position(const Instruction& instruction) {
  return instruction.fn == graph::Fn::kPosition || graph::is_draw(instruction.fn);
}

struct Store {
  uint32_t operand = 0;
  uint32_t value = 0;  // an instruction

  bool operator==(const Store&) const = default;
};

// For each turn of `loops` nested loops: all instructions in order, then the stores. Kept loops are
// outside, then come `reduced` ones, over which kSum, kAmax and kAmin run: what depends on their
// value comes in another pass over the reduced loops. Vectors go along the innermost reduced loop,
// or (`columns`) along one more kept loop within.
struct KernelSpec {
  uint32_t loops = 1;
  uint32_t reduced = 0;
  bool columns = false;
  std::vector<Operand> operands;
  std::vector<Position> positions;
  std::vector<bool> scalars;  // per number: whether it is a double (else an int64)
  std::vector<Instruction> instructions;
  std::vector<Store> stores;

  bool operator==(const KernelSpec&) const = default;
};

// What a call of a kernel passes, on the host as arguments, to CUDA in `cuda_argument_words` words
// of 64 bits in a row:
//   pointers  per operand, its first element
//   geometry  the sizes of the loops, outermost first; then the strides of each operand and of each
//             position, in elements
//   numbers   per scalar, the bits of a double or an int64
//   begin,end on the host: which elements, counted through all kept loops
//   parts     for CUDA, where something is reduced: what blocks leave for later stages (a pointer),
//             and in how many parts they take the outermost reduced loop and the innermost
using HostFunction = void (*)(char* const* pointers, const int64_t* geometry,
                              const int64_t* numbers, int64_t begin, int64_t end);

constexpr size_t argument_words(const KernelSpec& kernel) {
  const size_t strided = 1 + kernel.operands.size() + kernel.positions.size();
  return kernel.operands.size() + kernel.loops * strided + kernel.scalars.size();
}

constexpr size_t cuda_argument_words(const KernelSpec& kernel) {
  return argument_words(kernel) + (kernel.reduced > 0 ? 3 : 0);
}

}  // namespace acc::codegen
