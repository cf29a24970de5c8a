#include "kernels/codegen/render.h"

#include <algorithm>

#include "kernels/codegen/host_reduction.h"
#include "kernels/codegen/host_writer.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;
namespace dtype = graph::dtype;

// A function of host_math with more than a few instructions, each of which waits for the one
// before.
bool is_polynomial(const Instruction& instruction) {
  const Fn fn = instruction.fn;
  return instruction.dtype == dtype::kF32 &&
         (fn == Fn::kPow || (fn >= Fn::kExp && fn <= Fn::kErfc));
}

// Vectors for one turn of the loop. The processor computes a few dozen instructions ahead, hence a
// second turn beside the first while a turn holds one polynomial. Where one polynomial waits for
// another it does not see that far: such turns compute on several vectors by turns. Random words
// come four at a time, and those of several vectors side by side.
size_t choose_vectors(const KernelSpec& kernel) {
  constexpr size_t kVectors = 4;
  const std::vector<bool> uniform = find_uniform(kernel);
  std::vector<int> chain;  // per value: polynomials one after the other
  int longest = 0;
  for (size_t at = 0; at < kernel.instructions.size(); ++at) {
    const Instruction& instruction = kernel.instructions[at];
    int length = 0;
    for (int i = 0; i < graph::arity(instruction.fn); ++i) {
      length = std::max(length, chain[instruction.inputs[static_cast<size_t>(i)]]);
    }
    if (is_polynomial(instruction) && !uniform[at]) ++length;
    chain.push_back(length);
    longest = std::max(longest, length);
  }
  const auto draws = [](const Instruction& each) { return graph::is_draw(each.fn); };
  return longest > 1 || std::ranges::any_of(kernel.instructions, draws) ? kVectors : 1;
}

class ElementwiseWriter : HostWriter {
 public:
  explicit ElementwiseWriter(const KernelSpec& kernel)
      : HostWriter(kernel, choose_vectors(kernel)) {}

  KernelText run() {
    open_function();
    open_row();
    // The rest of a row, shorter than a turn, goes through the same loop in buffers.
    line("long at = column;");
    line("for (bool rest = false;; rest = true) {");
    line("for (; at + ", turn(), " <= stop; at += ", turn(), ") {");
    draw_ahead();
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      for (vector_ = 0; vector_ < vectors_ && !uniform_[i]; ++vector_) define(i);
    }
    for (const Store& store : kernel_.stores) {
      for (vector_ = 0; vector_ < vectors_; ++vector_) add_store(store);
    }
    vector_ = 0;
    line("}");
    close_row();
    line("}");
    line("}");
    return finish();
  }

 private:
  void open_function() {
    line("int count = 0;");
    line("const long columns = geometry[", loops() - 1, "];");
    add_steps();
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (is_constant(i)) define(i);
    }
    line("long row = begin / columns, column = begin % columns;");
    for (size_t loop = loops() - 1; loop-- > 0;) {
      line("long i", loop, " = row % geometry[", loop, "]; row /= geometry[", loop, "];");
    }
    line("while (begin < end) {");
  }

  void open_row() {
    line("long stop = column + (end - begin);");
    line("if (stop > columns) stop = columns;");
    line("begin += stop - column;");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      line(element(i), "* p", i, " = (", element(i), "*)pointers[", i, "]",
           offset(i, 0, loops() - 1), ";");
      if (kernel_.operands[i].walk == Walk::kStrided) line("long s", i, " = step", i, ";");
      if (kernel_.operands[i].walk != Walk::kBroadcast) {
        line(element(i), " rest", i, "[", turn(), "], *back", i, " = 0;");
      }
    }
    for (size_t i = 0; i < kernel_.positions.size(); ++i) {
      open_position(i, "0" + position_offset(i, 0, loops() - 1));
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
        line("take_rest(back", i, ", ", step_of(i), ", rest", i, ", left, ", turn(), ");");
      }
      line("p", i, " = rest", i, ";", strided ? concat(" s", i, " = 1;") : std::string());
    }
    for (size_t i = 0; i < kernel_.positions.size(); ++i) move_position(i);
    line("at = 0; stop = ", turn(), ";");
    line("}");
    line("column = 0;");
    for (size_t loop = loops() - 1; loop-- > 0;) {
      line("if (++i", loop, " < geometry[", loop, "]) continue;");
      line("i", loop, " = 0;");
    }
  }
};

}  // namespace

KernelText render_host(const KernelSpec& kernel) {
  return kernel.reduced > 0 ? render_host_reduction(kernel) : ElementwiseWriter(kernel).run();
}

}  // namespace acc::codegen
