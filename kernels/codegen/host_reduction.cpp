#include "kernels/codegen/host_reduction.h"

#include <algorithm>
#include <utility>

#include "kernels/codegen/host_writer.h"
#include "kernels/codegen/phases.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;
namespace dtype = graph::dtype;

// Kernels with reductions, in the phases of phases.h. Sums are taken lane by lane: kPart vectors at
// most in their own type, those sums in float64 (of float64, in two of them), and rounded once.
class ReductionWriter : HostWriter {
 public:
  explicit ReductionWriter(const KernelSpec& kernel)
      : HostWriter(kernel),
        phases_(find_phases(kernel, kernel.columns ? Again::kComputed : Again::kLoaded)) {}

  KernelText run() {
    add_steps();
    for (const uint32_t i : phases_.constants) define(i);
    if (kernel_.columns) {
      add_columns();
    } else {
      add_rows();
    }
    line("}");
    return finish();
  }

 private:
  size_t kept_loops() const { return loops() - kernel_.reduced; }

  // The reduced loops without that of vectors.
  std::pair<size_t, size_t> outer_reduced() const {
    const size_t outer_kept = kernel_.columns ? kept_loops() - 1 : kept_loops();
    return {outer_kept, loops() - 1};
  }

  void open_loop(size_t loop) {
    line("for (long i", loop, " = 0; i", loop, " < geometry[", loop, "]; ++i", loop, ") {");
  }
  void open_reduced() {
    const auto [first, last] = outer_reduced();
    for (size_t loop = first; loop < last; ++loop) open_loop(loop);
  }
  void close_reduced() {
    const auto [first, last] = outer_reduced();
    for (size_t loop = first; loop < last; ++loop) line("}");
  }

  // Operands that a run of instructions, loads and stores goes through.
  std::vector<size_t> operands_of(const std::vector<uint32_t>& instructions,
                                  const std::vector<Store>& loads,
                                  const std::vector<Store>& stores) const {
    std::vector<bool> used(kernel_.operands.size());
    for (const uint32_t i : instructions) {
      if (kernel_.instructions[i].fn == Fn::kOperand) used[kernel_.instructions[i].index] = true;
    }
    for (const Store& load : loads) used[load.operand] = true;
    for (const Store& store : stores) used[store.operand] = true;
    std::vector<size_t> found;
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) found.push_back(i);
    }
    return found;
  }

  std::vector<size_t> positions_of(const std::vector<uint32_t>& instructions) const {
    std::vector<size_t> found;
    for (const uint32_t i : instructions) {
      const Instruction& instruction = kernel_.instructions[i];
      if (has_position(instruction) && std::ranges::find(found, instruction.index) == found.end()) {
        found.push_back(instruction.index);
      }
    }
    return found;
  }

  static constexpr int kPart = 4;

  // Kept values, from where the last loop put them.
  void add_kept(const std::vector<uint32_t>& kept) {
    for (const uint32_t i : kept) {
      line("const ", vector_of(kernel_.instructions[i].dtype), " v", i, " = k", i, "[k];");
    }
  }

  // What is computed on a vector.
  void add_values(const std::vector<uint32_t>& instructions, const std::vector<Store>& loads) {
    for (const Store& store : loads) {
      line("const ", vector_of(kernel_.instructions[store.value].dtype), " v", store.value, " = ",
           load(store.operand), ";");
    }
    for (const uint32_t i : instructions) {
      const Instruction& instruction = kernel_.instructions[i];
      if (!graph::is_reduction(instruction.fn)) {
        define(i);
      } else {
        line("const ", vector_type(i), " v", i, " = ", is_widened(i) ? "rounded" : "", "(a", i,
             "[k]);");
      }
    }
  }

  // What goes along the vectors' loop: instructions that compute, `within` that do something with
  // it, and stores. The rest, shorter than a vector, goes through the same loop in buffers; sums
  // leave out its other lanes.
  template <class Within>
  void add_vectors(const std::vector<uint32_t>& instructions, const std::vector<Store>& loads,
                   const std::vector<Store>& stores, const std::vector<uint32_t>& sums,
                   const std::vector<uint32_t>& kept, const char* begin, const char* end,
                   const Within& within) {
    const auto [first, last] = outer_reduced();
    const std::vector<size_t> operands = operands_of(instructions, loads, stores);
    line("{");
    for (const size_t i : operands) {
      const Operand& operand = kernel_.operands[i];
      line(element(i), "* p", i, " = b", i, operand.kept ? "" : offset(i, first, last), ";");
      if (operand.walk == Walk::kStrided) line("long s", i, " = step", i, ";");
      if (operand.walk == Walk::kBroadcast) continue;
      line(element(i), " rest", i, "[W], *back", i, " = 0;");
    }
    const std::vector<size_t> positions = positions_of(instructions);
    for (const size_t i : positions) {
      const bool kept = kernel_.positions[i].kept;
      open_position(i, concat("r", i, kept ? "" : position_offset(i, first, last)));
    }
    line("long at = ", begin, ", stop = ", end, ", k = 0;");
    line("int count = 0;");
    line("for (bool rest = false;; rest = true) {");
    if (sums.empty()) {
      line("for (; at + W <= stop; at += W, ++k) {");
    } else {
      line("while (at + W <= stop) {");
      line("const long part = at + ", kPart, " * W < stop ? at + ", kPart, " * W : stop;");
      for (const uint32_t i : sums) line(vector_type(i), " sum", i, " = {};");
      line("for (; at + W <= part; at += W) {");
    }
    add_kept(kept);
    add_values(instructions, loads);
    within();
    for (const Store& store : stores) add_store(store);
    line("}");
    if (!sums.empty()) {
      for (const uint32_t i : sums) {
        line("if (rest) sum", i, " = select(lanes_below(count), sum", i, ", ", vector_type(i),
             "{});");
        line("add_to(a", i, ", sum", i, ");");
      }
      line("}");
    }
    line("if (rest) {");
    for (const Store& store : stores) {
      if (kernel_.operands[store.operand].walk == Walk::kBroadcast) continue;
      line("put_rest(back", store.operand, ", ", step_of(store.operand), ", rest", store.operand,
           ", count);");
    }
    line("break;");
    line("}");
    line("if (at == stop) break;");
    line("count = (int)(stop - at);");
    for (const size_t i : operands) {
      const Operand& operand = kernel_.operands[i];
      if (operand.walk == Walk::kBroadcast) continue;
      const bool strided = operand.walk == Walk::kStrided;
      line("back", i, " = p", i, " + at", strided ? concat(" * s", i) : std::string(), ";");
      if (is_loaded(i) || is_in(loads, i)) {
        line("take_rest(back", i, ", ", step_of(i), ", rest", i, ", count);");
      }
      line("p", i, " = rest", i, ";", strided ? concat(" s", i, " = 1;") : std::string());
    }
    for (const size_t i : positions) move_position(i);
    line("at = 0; stop = W;");
    line("}");
    line("}");
  }

  static bool is_in(const std::vector<Store>& stores, size_t operand) {
    return std::ranges::find(stores, operand, &Store::operand) != stores.end();
  }

  bool is_sum(uint32_t i) const { return kernel_.instructions[i].fn == Fn::kSum; }

  std::vector<uint32_t> sums_of(const Phase& phase) const {
    std::vector<uint32_t> sums;
    for (const uint32_t i : phase.reductions) {
      if (is_sum(i)) sums.push_back(i);
    }
    return sums;
  }

  const char* vector_type(uint32_t i) const { return vector_of(kernel_.instructions[i].dtype); }

  // Whether sums are taken with more digits than their type has.
  bool is_widened(uint32_t i) const {
    return is_sum(i) && dtype::is_floating(kernel_.instructions[i].dtype);
  }
  const char* accumulator_type(uint32_t i) const {
    if (!is_widened(i)) return vector_type(i);
    return kernel_.instructions[i].dtype == dtype::kF32 ? "Sums" : "CompensatedSums";
  }

  // What an accumulator begins with.
  std::string beginning(uint32_t i) const {
    if (is_sum(i)) return concat(accumulator_type(i), "{}");
    const Instruction& instruction = kernel_.instructions[i];
    return concat("splat_", vector_of(instruction.dtype), "(", neutral(instruction), ")");
  }

  // One more vector for a part of a sum, or for an accumulator; `at`: which, of several.
  void accumulate(uint32_t i, const char* at) {
    accumulate(i, at, concat("v", kernel_.instructions[i].inputs[0]));
  }
  void accumulate(uint32_t i, const char* at, const std::string& value) {
    const Instruction& instruction = kernel_.instructions[i];
    const std::string to = concat(is_sum(i) ? "sum" : "a", i, at);
    if (is_sum(i)) {
      line("add_to(", to, ", ", value, ");");
    } else {
      line(to, " = ", instruction.fn == Fn::kAmax ? "max_(" : "min_(", to, ", ", value, ");");
    }
  }

  // Where the positions of a row begin.
  void add_position_rows(size_t outer_loops) {
    for (size_t i = 0; i < kernel_.positions.size(); ++i) {
      line("const long r", i, " = 0", position_offset(i, 0, outer_loops), ";");
    }
  }

  // ---- vectors along the reduced loop: one kept element after the other

  void add_rows() {
    line("long row = begin;");
    for (size_t loop = kept_loops(); loop-- > 0;) {
      line("long i", loop, " = row % geometry[", loop, "]; row /= geometry[", loop, "];");
    }
    line("for (; begin < end; ++begin) {");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      line(element(i), "* b", i, " = (", element(i), "*)pointers[", i, "]",
           offset(i, 0, kept_loops()), ";");
    }
    add_position_rows(kept_loops());
    define_kept(phases_.before);
    for (const Phase& phase : phases_.phases) {
      for (const uint32_t i : phase.reductions) {
        line(accumulator_type(i), " a", i, " = ", beginning(i), ";");
      }
      open_reduced();
      const std::string columns = concat("geometry[", loops() - 1, "]");
      add_vectors(phase.instructions, phase.loads, phase.stores, sums_of(phase), {}, "0",
                  columns.c_str(), [&] { accumulate_row(phase); });
      close_reduced();
      for (const uint32_t i : phase.reductions) add_total(i);
      define_kept(phase.after);
    }
    for (const Store& store : phases_.kept_stores) {
      line("*b", store.operand, " = to_", element(store.operand), "(v", store.value, ")[0];");
    }
    for (size_t loop = kept_loops(); loop-- > 0;) {
      line("if (++i", loop, " < geometry[", loop, "]) continue;");
      line("i", loop, " = 0;");
    }
    line("}");
  }

  // In the rest of a row the lanes behind its end have its first element; where there are positions
  // they have those of elements that are not the row's.
  void accumulate_row(const Phase& phase) {
    const bool apart = !positions_of(phase.instructions).empty();
    for (const uint32_t i : phase.reductions) {
      const std::string value = concat("v", kernel_.instructions[i].inputs[0]);
      if (!apart || is_sum(i)) {
        accumulate(i, "", value);
      } else {
        accumulate(
            i, "",
            concat("rest ? select(lanes_below(count), ", value, ", ", beginning(i), ") : ", value));
      }
    }
  }

  // Kept values in all lanes.
  void define_kept(const std::vector<uint32_t>& instructions) {
    for (const uint32_t i : instructions) {
      const Instruction& instruction = kernel_.instructions[i];
      if (graph::is_reduction(instruction.fn)) continue;
      if (instruction.fn == Fn::kOperand) {
        line("const ", vector_of(instruction.dtype), " v", i, " = from_",
             element(instruction.index), "(spread(*b", instruction.index, "));");
      } else if (instruction.fn == Fn::kPosition) {
        line("const F32 v", i, " = splat_F32(r", instruction.index, ");");
      } else if (graph::is_draw(instruction.fn)) {
        line("const ", vector_of(instruction.dtype), " v", i, " = ",
             draw_here(i, concat("r", instruction.index), "0"), ";");
      } else {
        define(i);
      }
    }
  }

  // The value of a reduction, of the lanes of its accumulator.
  void add_total(uint32_t i) {
    const Instruction& instruction = kernel_.instructions[i];
    const char* lanes = is_sum(i)                     ? "sum_lanes"
                        : instruction.fn == Fn::kAmax ? "max_lanes"
                                                      : "min_lanes";
    line("const ", vector_of(instruction.dtype), " v", i, " = splat_", vector_of(instruction.dtype),
         "(", lanes, "(a", i, "));");
  }

  // ---- vectors along a kept loop: a strip of them at a time, some rows of the reduced loops each

  static constexpr int kStrip = 32;  // vectors: what a strip accumulates stays in the first cache

  void add_columns() {
    const size_t outer = kept_loops() - 1;
    line("const long columns = geometry[", loops() - 1, "];");
    line("long row = begin / columns, column = begin % columns;");
    for (size_t loop = outer; loop-- > 0;) {
      line("long i", loop, " = row % geometry[", loop, "]; row /= geometry[", loop, "];");
    }
    line("while (begin < end) {");
    line("long row_end = column + (end - begin);");
    line("if (row_end > columns) row_end = columns;");
    line("begin += row_end - column;");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      line(element(i), "* b", i, " = (", element(i), "*)pointers[", i, "]", offset(i, 0, outer),
           ";");
    }
    add_position_rows(outer);
    line("for (; column < row_end; column += ", kStrip, " * W) {");
    line("const long strip_end = row_end < column + ", kStrip, " * W ? row_end : column + ", kStrip,
         " * W;");
    line("const int strip = (int)((strip_end - column + W - 1) / W);");
    add_kept_strip(phases_.before, {});
    for (size_t p = 0; p < phases_.phases.size(); ++p) {
      const Phase& phase = phases_.phases[p];
      for (const uint32_t i : phase.reductions) {
        line(accumulator_type(i), " a", i, "[", kStrip, "];");
        line("for (int k = 0; k < strip; ++k) a", i, "[k] = ", beginning(i), ";");
      }
      if (phase.reductions.empty() || !positions_of(phase.instructions).empty()) {
        add_row_by_row(phase);
      } else {
        add_vector_by_vector(phase);
      }
      const bool last = p + 1 == phases_.phases.size();
      add_kept_strip(phase.after, last ? phases_.kept_stores : std::vector<Store>());
    }
    line("}");
    line("column = 0;");
    for (size_t loop = outer; loop-- > 0;) {
      line("if (++i", loop, " < geometry[", loop, "]) continue;");
      line("i", loop, " = 0;");
    }
    line("}");
  }

  // The reduced loops, the innermost in pieces of kPart turns, each of which is a part of the sums.
  void open_parts() {
    const auto [first, last] = outer_reduced();
    for (size_t loop = first; loop + 1 < last; ++loop) open_loop(loop);
    const std::string turns = concat("geometry[", last - 1, "]");
    line("for (long part = 0; part < ", turns, "; part += ", kPart, ") {");
    line("const long behind = part + ", kPart, " < ", turns, " ? part + ", kPart, " : ", turns,
         ";");
  }
  void open_part() {
    const size_t inner = outer_reduced().second - 1;
    line("for (long i", inner, " = part; i", inner, " < behind; ++i", inner, ") {");
  }
  void close_parts() {
    line("}");
    const auto [first, last] = outer_reduced();
    for (size_t loop = first; loop + 1 < last; ++loop) line("}");
  }

  void add_row_by_row(const Phase& phase) {
    const std::vector<uint32_t> sums = sums_of(phase);
    open_parts();
    for (const uint32_t i : sums) {
      line(vector_type(i), " sum", i, "[", kStrip, "];");
      line("for (int k = 0; k < strip; ++k) sum", i, "[k] = ", vector_type(i), "{};");
    }
    open_part();
    add_strip(phase.instructions, phase.loads, phase.stores, phase.reductions, [&] {
      for (const uint32_t i : phase.reductions) accumulate(i, "[k]");
    });
    line("}");
    for (const uint32_t i : sums) {
      line("for (int k = 0; k < strip; ++k) add_to(a", i, "[k], sum", i, "[k]);");
    }
    close_parts();
  }

  // The same with a part's rows within the loop of vectors: what they add up to is in a register.
  void add_vector_by_vector(const Phase& phase) {
    const auto [first, last] = outer_reduced();
    const std::vector<size_t> operands = operands_of(phase.instructions, phase.loads, phase.stores);
    const std::vector<uint32_t> sums = sums_of(phase);
    open_parts();
    line("int k = 0;");
    line("for (long left = column; left < strip_end; left += W, ++k) {");
    line("const int count = strip_end - left < W ? (int)(strip_end - left) : W;");
    add_kept(kept_in(phase.instructions, phase.stores, phase.reductions));
    for (const uint32_t i : sums) line(vector_type(i), " sum", i, " = {};");
    open_part();
    line("const long at = 0;");
    for (const size_t i : operands) open_vector(i, first, last, phase);
    add_values(phase.instructions, phase.loads);
    for (const uint32_t i : phase.reductions) accumulate(i, is_sum(i) ? "" : "[k]");
    for (const Store& store : phase.stores) {
      add_store(store);
      if (kernel_.operands[store.operand].walk == Walk::kBroadcast) continue;
      line("if (count < W) put_rest(back", store.operand, ", ", step_of(store.operand), ", rest",
           store.operand, ", count);");
    }
    line("}");
    for (const uint32_t i : sums) line("add_to(a", i, "[k], sum", i, ");");
    line("}");
    close_parts();
  }

  // An operand's vector in a row; one that is not whole stands in a buffer.
  void open_vector(size_t i, size_t first, size_t last, const Phase& phase) {
    const Operand& operand = kernel_.operands[i];
    const bool strided = operand.walk == Walk::kStrided;
    line(element(i), "* p", i, " = b", i, operand.kept ? "" : offset(i, first, last), ";");
    if (operand.walk == Walk::kBroadcast) return;
    line("p", i, " += left", strided ? concat(" * step", i) : std::string(), ";");
    if (strided) line("long s", i, " = step", i, ";");
    line(element(i), " rest", i, "[W], *back", i, " = p", i, ";");
    line("if (count < W) {");
    if (is_loaded(i) || is_in(phase.loads, i)) {
      line("take_rest(back", i, ", ", step_of(i), ", rest", i, ", count);");
    }
    line("p", i, " = rest", i, ";", strided ? concat(" s", i, " = 1;") : std::string());
    line("}");
  }

  // The kept values that a phase uses.
  std::vector<uint32_t> kept_in(const std::vector<uint32_t>& instructions,
                                const std::vector<Store>& stores,
                                const std::vector<uint32_t>& reductions) const {
    std::vector<bool> uses(kernel_.instructions.size());
    for (const uint32_t i : instructions) {
      const Instruction& instruction = kernel_.instructions[i];
      if (graph::is_reduction(instruction.fn)) continue;
      for (int k = 0; k < graph::arity(instruction.fn); ++k) {
        uses[instruction.inputs[static_cast<size_t>(k)]] = true;
      }
    }
    for (const Store& store : stores) uses[store.value] = true;
    for (const uint32_t i : reductions) uses[kernel_.instructions[i].inputs[0]] = true;
    for (const uint32_t i : instructions) uses[i] = false;
    std::vector<uint32_t> kept;
    for (uint32_t i = 0; i < uses.size(); ++i) {
      if (uses[i] && phases_.kept[i]) kept.push_back(i);
    }
    return kept;
  }

  // A loop over the strip, with the kept values that it uses from where the last loop put them.
  template <class Within>
  void add_strip(const std::vector<uint32_t>& instructions, const std::vector<Store>& loads,
                 const std::vector<Store>& stores, const std::vector<uint32_t>& reductions,
                 const Within& within) {
    add_vectors(instructions, loads, stores, {}, kept_in(instructions, stores, reductions),
                "column", "strip_end", within);
  }

  // What is computed once per kept element, into arrays.
  void add_kept_strip(const std::vector<uint32_t>& instructions, const std::vector<Store>& stores) {
    if (instructions.empty() && stores.empty()) return;
    for (const uint32_t i : instructions) {
      line(vector_of(kernel_.instructions[i].dtype), " k", i, "[", kStrip, "];");
    }
    add_strip(instructions, {}, stores, {}, [&] {
      for (const uint32_t i : instructions) line("k", i, "[k] = v", i, ";");
    });
  }

  const Phases phases_;
};

}  // namespace

KernelText render_host_reduction(const KernelSpec& kernel) { return ReductionWriter(kernel).run(); }

}  // namespace acc::codegen
