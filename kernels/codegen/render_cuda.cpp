#include <algorithm>
#include <numeric>

#include "kernels/codegen/cuda_launch.h"
#include "kernels/codegen/cuda_words.h"
#include "kernels/codegen/phases.h"
#include "kernels/codegen/render.h"
#include "kernels/codegen/writer.h"
#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"

namespace acc::codegen {
namespace {

using base::concat;
using graph::Fn;

// A kernel for CUDA. A thread computes V neighbours along the innermost loop at a time; where all
// memory is WHOLE words of them it reads and writes them at once. Element `e` of the V at `at` of
// operand i is w<i>.v[e] where it is contiguous. Sums are taken in parts, those in float64 where
// the type is float32, and rounded once.
class CudaWriter : Writer {
 public:
  CudaWriter(const KernelSpec& kernel, bool in_parts)
      : Writer(kernel), phases_(find_phases(kernel)), in_parts_(in_parts) {
    // Between stages nothing is held.
    if (kernel.reduced > 0 && !in_parts) held_ = find_held(kernel, phases_);
  }

  // What a block does, all at once or in the stage that it is told: the function body_<name>.
  KernelText body() {
    if (!kernel_.columns) line("constexpr int V = ", neighbours(), ";");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      if (kernel_.operands[i].walk == Walk::kStrided) {
        line("const long step", i, " = ", stride(i, loops() - 1), ";");
      }
    }
    for (size_t i = 0; i < kernel_.positions.size(); ++i) {
      line("const long t", i, " = ", stride(kernel_.operands.size() + i, loops() - 1), ";");
    }
    for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (is_constant(i)) define(i);
      if (graph::is_draw(kernel_.instructions[i].fn)) line("Words4 words", i, ";");
    }
    if (kernel_.reduced == 0) {
      add_elements();
    } else if (kernel_.columns) {
      add_columns();
    } else {
      add_rows();
    }
    line("}");
    return finish("template <bool WHOLE> DEVICE void body_",
                  "(char* const* pointers, const long* geometry, const long* numbers, "
                  "const long* parts, int stage, long block, long blocks, long* scratch)");
  }

  // The function that is launched; with another that does all at once where that is asked for.
  // Words are whole where all rows begin and end with one.
  std::string entry(const std::string& name, const std::string& at_once = "") const {
    const size_t n = neighbours();
    std::string text = concat(
        "extern \"C\" __global__ void __launch_bounds__(", most_threads(kernel_), ", ",
        kThreadsAtOnce / most_threads(kernel_), ") ", name,
        "(const long* table, int calls, int stage) {\n",
        "const int call = calls == 1 ? 0 : call_of(table, calls);\n",
        "const long* arguments = table + calls + 1 + call * ", cuda_argument_words(kernel_), "L;\n",
        "char* const* pointers = (char* const*)arguments;\n", "const long* geometry = arguments + ",
        kernel_.operands.size(), ";\n", "const long* parts = arguments + ", argument_words(kernel_),
        ";\n", "const long* numbers = parts - ", kernel_.scalars.size(), ";\n",
        "const long block = blockIdx.x - table[call];\n",
        "const long blocks = table[call + 1] - table[call];\n");
    if (kernel_.reduced > 0) text += "alignas(16) extern __shared__ long scratch[];\n";
    const std::string given = concat("(pointers, geometry, numbers, parts, stage, block, blocks, ",
                                     kernel_.reduced > 0 ? "scratch" : "nullptr", ");\n");
    const auto call = [&](const char* whole) {
      const std::string body = concat("body_", name, "<", whole, ">", given);
      if (at_once.empty()) return body;
      return concat("if (stage < 0) ", at_once, "<", whole, ">", given, "else ", body);
    };
    if (n == 1) return concat(text, call("true"), "}\n");
    text += concat("bool whole = geometry[", loops() - 1, "] % ", n, " == 0;\n");
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      if (!by_words(i)) continue;
      const size_t bytes = std::min(n * element_size(i), size_t{16});
      text += concat("whole &= (long)pointers[", i, "] % ", bytes, " == 0");
      for (size_t loop = 0; loop + 1 < loops(); ++loop) {
        text += concat(" && ", stride(i, loop), " % ", n, " == 0");
      }
      text += ";\n";
    }
    return concat(text, "if (whole) {\n", call("true"), "} else {\n", call("false"), "}\n}\n");
  }

 private:
  size_t kept_loops() const { return loops() - kernel_.reduced; }
  size_t element_size(size_t operand) const {
    return graph::element_bytes(kernel_.operands[operand].dtype);
  }
  bool by_words(size_t operand) const { return codegen::by_words(kernel_, operand); }
  size_t neighbours() const { return cuda_neighbours(kernel_); }
  std::vector<bool> loaded_by(const Phase& phase) const {
    return codegen::loaded_by(kernel_, phase.instructions, phase.loads);
  }

  // Where it is put: the pointers of many results would take registers all the time.
  bool opened_late(size_t operand) const {
    return kernel_.reduced == 0 && by_words(operand) && !is_loaded(operand);
  }

  // ---- elements

  std::string element_of(size_t i) const {
    const Operand& operand = kernel_.operands[i];
    const char* base = operand.kept ? "b" : "p";
    if (kernel_.columns) {
      switch (operand.walk) {
        case Walk::kBroadcast:
          return concat("*", base, i);
        case Walk::kContiguous:
          return concat(base, i, "[column]");
        case Walk::kStrided:
          return concat(base, i, "[column * step", i, "]");
      }
    }
    if (operand.kept || operand.walk == Walk::kBroadcast) return concat("*", base, i);
    if (by_words(i)) return concat("w", i, ".v[e]");
    return concat("p", i, "[(at + e) * step", i, "]");
  }
  std::string load(size_t i) const override {
    return concat("from_", element(i), "(", element_of(i), ")");
  }
  std::string count(size_t i) const override { return concat("splat_F32(", index(i), ")"); }
  std::string index(size_t i) const {
    const char* base = kernel_.positions[i].kept ? "r" : "q";
    if (kernel_.positions[i].walk == Walk::kBroadcast) return concat(base, i);
    return concat(base, i, " + ", kernel_.columns ? "column" : "(at + e)", " * t", i);
  }
  std::string drawn(size_t i) const override {
    const Instruction& instruction = kernel_.instructions[i];
    return concat(graph::name_of(instruction.fn), "_(words", i, ", ", index(instruction.index),
                  ", ", stream(i), bound(i), ")");
  }
  std::string name_of(Fn fn, uint8_t) const override { return concat(graph::name_of(fn), "_"); }

  void add_store(const char* guard, const Store& store) {
    line(guard, element_of(store.operand), " = to_", element(store.operand), "(",
         value(store.value), ");");
  }

  // ---- loops

  // The pointers of operands, each further on than that of `base` by the loops from `first` to
  // before `last`.
  void open_pointers(const char* name, const std::vector<size_t>& operands, const char* base,
                     size_t first, size_t last) {
    for (const size_t i : operands) {
      const std::string from =
          *base == '\0' ? concat("global<", element(i), ">(pointers[", i, "])") : concat(base, i);
      line(element(i), "* ", name, i, " = ", from, offset(i, first, last), ";");
    }
  }
  // Within a row. Where operands are many their addresses are made anew in each phase: registers
  // that keep those of ten, four of them held, left 168 bytes of a thread in memory, 96 without.
  void open_pointers_in_row(const std::vector<size_t>& operands, size_t last) {
    constexpr size_t kMany = 10;
    const bool many = kernel_.operands.size() >= kMany;
    open_pointers("p", operands, many ? "" : "b", many ? 0 : kept_loops(), last);
  }
  void open_positions(const char* name, const std::vector<size_t>& positions, const char* base,
                      size_t first, size_t last) {
    for (const size_t i : positions) {
      const std::string from = *base == '\0' ? std::string("0") : concat(base, i);
      line("const long ", name, i, " = ", from, position_offset(i, first, last), ";");
    }
  }
  // All of them, or those that vary along the reduced loops and that a phase goes through.
  std::vector<size_t> operands() const {
    std::vector<size_t> found(kernel_.operands.size());
    std::iota(found.begin(), found.end(), size_t{0});
    return found;
  }
  std::vector<size_t> operands_of(const Phase& phase) const {
    std::vector<bool> used = loaded_by(phase);
    for (const Store& store : phase.stores) used[store.operand] = true;
    std::vector<size_t> found;
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) found.push_back(i);
    }
    return found;
  }
  std::vector<size_t> positions() const {
    std::vector<size_t> found(kernel_.positions.size());
    std::iota(found.begin(), found.end(), size_t{0});
    return found;
  }
  std::vector<size_t> positions_of(const Phase& phase) const {
    std::vector<size_t> found;
    for (const uint32_t i : phase.instructions) {
      const Instruction& instruction = kernel_.instructions[i];
      if (has_position(instruction) && std::ranges::find(found, instruction.index) == found.end()) {
        found.push_back(instruction.index);
      }
    }
    return found;
  }

  // The indices of the loops before `last`, which have turned so many times.
  void open_row(const char* turns, size_t last) {
    if (last > 0) line("long row = ", turns, ";");
    for (size_t loop = last; loop-- > 0;) {
      line("const long i", loop, " = row % geometry[", loop, "];");
      line("row /= geometry[", loop, "];");
    }
  }
  std::string turns_before(size_t last) const {
    std::string text = "1L";
    for (size_t loop = 0; loop < last; ++loop) text += concat(" * geometry[", loop, "]");
    return text;
  }

  std::string words_of(size_t operand) const { return concat("Words<", element(operand), ", V>"); }
  std::vector<bool> stored_by(const std::vector<Store>& stores) const {
    std::vector<bool> stored(kernel_.operands.size());
    for (const Store& store : stores) stored[store.operand] = true;
    return stored;
  }
  // How many neighbours there are at `at`, before `end`.
  void open_stop(const std::string& end) {
    line("const int stop = WHOLE || at + V <= ", end, " ? V : (int)(", end, " - at);");
  }
  // One after the other: neighbours at `at`, whose words are there; those that are stored are put.
  template <class Within>
  void add_neighbours(const std::vector<Store>& stores, const char* guard, const Within& within) {
    line("#pragma unroll");
    line("for (int e = 0; e < V; ++e) {");
    line("if (!WHOLE && e >= stop) break;");
    within();
    for (const Store& store : stores) add_store(by_words(store.operand) ? "" : guard, store);
    line("}");
    const std::vector<bool> stored = stored_by(stores);
    for (size_t i = 0; i < stored.size(); ++i) {
      if (!by_words(i) || !stored[i]) continue;
      if (opened_late(i)) open_pointers("p", {i}, "", 0, loops() - 1);
      line(guard, "put<WHOLE>(p", i, " + at, w", i, ", stop);");
    }
  }

  // ---- a thread's turns along a row

  // What is held of it has a slot for each turn of each thread. Memory that is read before it is
  // written is fetched before the first turn.
  bool is_held(size_t operand) const { return held_.bytes > 0 && held_.operands[operand]; }
  bool is_fetched(size_t operand) const {
    return is_held(operand) && loaded_by(phases_.phases[held_.first[operand]])[operand];
  }
  bool has_slots(size_t phase) const {
    const std::vector<bool> loaded = loaded_by(phases_.phases[phase]);
    for (size_t i = 0; i < loaded.size(); ++i) {
      if (is_held(i) && (loaded[i] || held_.first[i] == phase)) return true;
    }
    return false;
  }
  static constexpr const char* kOpenSlot = "u32 slot = threadIdx.y * blockDim.x + threadIdx.x;";
  static constexpr const char* kNextSlot = "slot += blockDim.x * blockDim.y;";
  std::string slot(size_t operand) const {
    return concat("(h", operand, ", slots, slot, w", operand, ");");
  }
  void open_held() {
    if (held_.bytes == 0) return;
    const size_t scratch = cuda_scratch(kernel_);
    // whole warps of them
    line("const u32 slots = (shared_bytes() - ", scratch, ") / ", held_.bytes, " / 32 * 32;");
    size_t before = 0;
    for (size_t i = 0; i < kernel_.operands.size(); ++i) {
      if (!is_held(i)) continue;
      line("char* const h", i, " = (char*)scratch + ", scratch, " + slots * ", before, ";");
      before += neighbours() * element_size(i);
    }
  }
  // All of the row that there is room for is on its way at once.
  void add_fetches() {
    std::vector<size_t> fetched = operands();
    std::erase_if(fetched, [&](size_t i) { return !is_fetched(i); });
    if (fetched.empty()) return;
    line("{");
    line(kOpenSlot);
    open_row_loops();
    open_pointers_in_row(fetched, loops() - 1);
    line("for (long at = begin + first; at < end && slot < slots; at += apart) {");
    open_stop("end");
    for (const size_t i : fetched) {
      line("fetch<WHOLE, V>(h", i, ", slots, slot, p", i, " + at, stop);");
    }
    line(kNextSlot);
    for (size_t loop = kept_loops(); loop <= loops(); ++loop) line("}");
    line("arrive();");
  }
  // What is not held is asked for before the first word of several turns is used. Where rows are no
  // whole words, each turn has several loads as it is.
  template <class Within>
  void add_turns(size_t stage, const Within& within) {
    const Phase& phase = phases_.phases[stage];
    const std::vector<bool> loaded = loaded_by(phase);
    const std::vector<bool> stored = stored_by(phase.stores);
    const bool slots = has_slots(stage);
    std::vector<size_t> taken = operands();
    std::erase_if(taken, [&](size_t i) { return !by_words(i) || !loaded[i] || is_held(i); });
    std::vector<bool> ahead(loaded.size());
    for (const size_t i : taken) ahead[i] = true;
    const int turns = turns_at_once(kernel_, ahead);
    line("constexpr int U = ", turns == 1 ? "1" : concat("WHOLE ? ", turns, " : 1"), ";");
    line("for (long from = begin + first; from < end; from += U * apart) {");
    const auto open_turn = [&] {
      line("#pragma unroll");
      line("for (int u = 0; u < U; ++u) {");
      line("const long at = from + u * apart;");
      line("if (at >= end) break;");
      open_stop("end");
    };
    if (!taken.empty()) {
      for (const size_t i : taken) line(words_of(i), " taken", i, "[U];");
      open_turn();
      for (const size_t i : taken) line("take<WHOLE>(taken", i, "[u], p", i, " + at, stop);");
      line("}");
    }
    open_turn();
    for (size_t i = 0; i < loaded.size(); ++i) {
      if (!by_words(i) || !(loaded[i] || stored[i])) continue;
      if (ahead[i]) {
        line(words_of(i), "& w", i, " = taken", i, "[u];");
        continue;
      }
      line(words_of(i), " w", i, ";");
      if (!loaded[i]) continue;
      line("if (slot < slots) recall", slot(i));
      line("else take<WHOLE>(w", i, ", p", i, " + at, stop);");
    }
    within();
    for (size_t i = 0; i < stored.size(); ++i) {
      const bool begins = is_held(i) && !loaded[i] && held_.first[i] == stage;
      if (begins) line("if (slot < slots) hold", slot(i));
    }
    if (slots) line(kNextSlot);
    end_turn(phase, "V", false);
    line("}\n}");
  }

  // ---- elementwise kernels

  void add_elements() {
    const size_t last = loops() - 1;
    std::vector<uint32_t> instructions;
    for (uint32_t i = 0; i < kernel_.instructions.size(); ++i) {
      if (!is_constant(i)) instructions.push_back(i);
    }
    line("const long turns = (geometry[", last, "] + V - 1) / V;");
    line("const long all = turns * ", turns_before(last), ";");
    line(
        "for (long turn = block * blockDim.x + threadIdx.x; turn < all; "
        "turn += blocks * blockDim.x) {");
    line("const long at = turn % turns * V;");
    open_row("turn / turns", last);
    std::vector<size_t> early = operands();
    std::erase_if(early, [&](size_t i) { return opened_late(i); });
    open_pointers("p", early, "", 0, last);
    open_positions("q", positions(), "", 0, last);
    open_stop(concat("geometry[", last, "]"));
    const std::vector<bool> loaded = codegen::loaded_by(kernel_, instructions, {});
    const std::vector<bool> stored = stored_by(kernel_.stores);
    for (size_t i = 0; i < loaded.size(); ++i) {
      if (!by_words(i) || !(loaded[i] || stored[i])) continue;
      line(words_of(i), " w", i, ";");
      if (loaded[i]) line("take<WHOLE>(w", i, ", p", i, " + at, stop);");
    }
    add_neighbours(kernel_.stores, "", [&] {
      for (const uint32_t i : instructions) define(i);
    });
    line("}");
  }

  // ---- reductions

  static const char* operation_of(Fn fn) {
    return fn == Fn::kSum ? "Sum" : fn == Fn::kAmax ? "Amax" : "Amin";
  }
  void define_all(const std::vector<uint32_t>& instructions) {
    for (const uint32_t i : instructions) {
      if (!graph::is_reduction(kernel_.instructions[i].fn)) define(i);
    }
  }
  void define_loads(const std::vector<Store>& loads) {
    for (const Store& store : loads) {
      line("const ", vector_of(kernel_.instructions[store.value].dtype), " v", store.value, " = ",
           load(store.operand), ";");
    }
  }
  bool is_sum(uint32_t i) const { return kernel_.instructions[i].fn == Fn::kSum; }
  const char* type_of(uint32_t i) const { return vector_of(kernel_.instructions[i].dtype); }
  const char* accumulator_of(uint32_t i) const {
    const bool widened = is_sum(i) && kernel_.instructions[i].dtype == graph::dtype::kF32;
    return widened ? "F64" : type_of(i);
  }

  std::string neutral_of(uint32_t i) const {
    return is_sum(i) ? "0" : neutral(kernel_.instructions[i]);
  }

  static std::string turns_of(const Phase& phase) {
    return concat("turns", phase.reductions.front());
  }

  // Accumulators of `count` neighbours: of sums, for some turns.
  void open_accumulators(const Phase& phase, const char* count) {
    bool sums = false;
    for (const uint32_t i : phase.reductions) {
      sums |= is_sum(i);
      if (is_sum(i)) line(accumulator_of(i), " all", i, " = 0;");
      line(type_of(i), " a", i, "[", count, "];");
      begin(i, count);
    }
    if (sums) line("int ", turns_of(phase), " = 0;");
  }
  void begin(uint32_t i, const char* count) {
    line("#pragma unroll");
    line("for (int e = 0; e < ", count, "; ++e) a", i, "[e] = ", neutral_of(i), ";");
  }
  void accumulate(const Phase& phase, const char* which) {
    for (const uint32_t i : phase.reductions) {
      const Instruction& instruction = kernel_.instructions[i];
      const std::string to = concat("a", i, "[", which, "]");
      line(to, " = ", operation_of(instruction.fn), "::of(", to, ", v", instruction.inputs[0],
           ");");
    }
  }
  // After a turn, and when there are no more.
  void end_turn(const Phase& phase, const char* count, bool last) {
    if (std::ranges::none_of(phase.reductions, [&](uint32_t i) { return is_sum(i); })) return;
    if (!last) line("if (++", turns_of(phase), " == ", kTurns, ") {");
    for (const uint32_t i : phase.reductions) {
      if (!is_sum(i)) continue;
      line("all", i, " = add_(all", i, ", (", accumulator_of(i), ")fold<Sum>(a", i, "));");
      if (!last) begin(i, count);
    }
    if (!last) line(turns_of(phase), " = 0;\n}");
  }

  // ---- sums that run along with the phase before theirs (base_of)

  // Stages do without: so few rows are in parts that caches have them.
  bool is_running(size_t stage) const {
    return !in_parts_ && stage < phases_.phases.size() && phases_.phases[stage].running;
  }
  uint32_t base(uint32_t sum) const { return *base_of(kernel_, sum); }
  // Where they save a reading of memory. Not by what this GPU's blocks hold, on which no bit may
  // depend.
  void open_running() {
    if (!std::ranges::any_of(phases_.phases, &Phase::running) || in_parts_) return;
    std::string long_row = "true";
    if (held_.bytes > 0) {
      long_row = "1L";
      for (size_t i = kept_loops(); i < loops(); ++i) long_row += concat(" * geometry[", i, "]");
      long_row += concat(" > ", kMostHeld / held_.bytes * neighbours());
    }
    line("const bool running = ", long_row, ";");
  }
  void open_bases(const Phase& phase) {
    for (const uint32_t i : phase.reductions) line("F32 base", i, " = -0x1.fffffep127f;");
  }
  // Of what the phase before has seen in this turn; `within` adds it. To fold a maximum twice does
  // not change it.
  template <class Within>
  void add_running(const Phase& phase, const char* count, const Within& within) {
    line("if (running) {");
    for (const uint32_t i : phase.reductions) {
      const uint32_t largest = base(i);
      line("const F32 most", i, " = fold<Amax>(a", largest, ");");
      line("if (most", i, " > base", i, " + SLACK) move_base(base", i, ", most", i, ", all", i,
           ", a", i, ");");
      line("const F32 v", largest, " = base", i, ";");
    }
    within();
    end_turn(phase, count, false);
    line("}");
  }
  // Sums that ran need no more than their base. Where that is infinite or NaN they become NaN, as
  // they would have.
  void open_rest(const Phase& phase) {
    line("if (running) {");
    for (const uint32_t i : phase.reductions) {
      line("move_base(base", i, ", v", base(i), ", all", i, ", a", i, ");");
    }
    line("} else {");
  }

  // What the threads of a block have together.
  std::string total(uint32_t i) const {
    const char* operation = operation_of(kernel_.instructions[i].fn);
    const char* across = kernel_.columns ? "across_y" : "across_x";
    const std::string own =
        is_sum(i) ? concat("all", i) : concat("fold<", operation, ">(a", i, ")");
    return concat(across, "<", operation, ">(", own, ", scratch)");
  }
  void add_totals(const Phase& phase) {
    for (const uint32_t i : phase.reductions) {
      line("const ", type_of(i), " v", i, " = (", type_of(i), ")", total(i), ";");
    }
  }

  // ---- stages: a phase each, and one for what is kept

  // What a block leaves of a reduction, for the blocks of the next stage. The parts of rows stand
  // in a row, those of columns below each other.
  size_t number_of(uint32_t reduction) const {
    return static_cast<size_t>(std::ranges::count_if(
        kernel_.instructions.begin(), kernel_.instructions.begin() + reduction,
        [](const Instruction& each) { return graph::is_reduction(each.fn); }));
  }
  std::string left(uint32_t i) const {
    return concat("left<", accumulator_of(i), ">(parts, ", number_of(i), " * kept * count, ",
                  kernel_.columns ? "element)" : "element * count)");
  }
  const char* step_of_parts() const { return kernel_.columns ? "kept" : "1"; }

  void open_stage(size_t stage) {
    if (in_parts_) line("if (stage == ", stage, ") {");
  }
  // The values of the phase's reductions.
  void end_stage(const Phase& phase) {
    if (!in_parts_) return add_totals(phase);
    const char* leader = kernel_.columns ? "threadIdx.y == 0" : "threadIdx.x == 0";
    for (const uint32_t i : phase.reductions) {
      line("const ", accumulator_of(i), " total", i, " = ", total(i), ";");
      line("if (here && ", leader, ") ", left(i), "[part * ", step_of_parts(), "] = total", i, ";");
    }
    line("continue;\n}");
    for (const uint32_t i : phase.reductions) {
      line("const ", type_of(i), " v", i, " = (", type_of(i), ")",
           kernel_.columns ? "gathered_y<" : "gathered_x<",
           operation_of(kernel_.instructions[i].fn), ">(", left(i), ", count, ", step_of_parts(),
           ", (", accumulator_of(i), ")", neutral_of(i), ", scratch);");
    }
  }
  void add_kept_stores() {
    // All threads have read what was there before they met in a reduction; other blocks read it in
    // earlier stages.
    const std::string guard =
        concat("if (here && ", kernel_.columns ? "threadIdx.y" : "threadIdx.x", " == 0) ");
    for (const Store& store : phases_.kept_stores) add_store(guard.c_str(), store);
  }
  // Groups of kept elements, each as often as it has parts, over the blocks.
  void open_groups(const char* groups) {
    if (!in_parts_) {
      line("for (long group = block; group < ", groups, "; group += blocks) {");
      return;
    }
    line("const long count = parts[1] * parts[2];");
    line("for (long turn = block; turn < ", groups, " * count; turn += blocks) {");
    line("const long group = turn / count, part = turn % count;");
    line("if (stage == ", phases_.phases.size(), " && part > 0) continue;");  // of what is kept
  }
  // Reduced loops but for the innermost.
  void open_reduced_loops(size_t first, size_t last) {
    for (size_t loop = first; loop < last; ++loop) {
      const bool divided = in_parts_ && loop == first;
      const std::string size = concat("geometry[", loop, "]");
      const std::string begin =
          divided ? concat(size, " * (part / parts[2]) / parts[1]") : std::string("0");
      const std::string end = divided ? concat(size, " * (part / parts[2] + 1) / parts[1]") : size;
      if (shares_threads() && loop + 1 == last) {
        line("for (long i", loop, " = ", begin, " + threadIdx.x / lanes; i", loop, " < ", end,
             "; i", loop, " += blockDim.x / lanes) {");
        continue;
      }
      line("for (long i", loop, " = ", begin, "; i", loop, " < ", end, "; ++i", loop, ") {");
    }
  }
  // Whether a row of threads goes through several rows of elements at once, where these are short:
  // a batch norm's of 7 by 7 would leave more than half of a warp idle.
  bool shares_threads() const { return !kernel_.columns && kernel_.reduced > 1; }
  // Where the innermost begins and ends, in steps of `step`.
  void open_range(size_t loop, const char* step) {
    const std::string size = concat("geometry[", loop, "]");
    if (!in_parts_) {
      line("const long begin = 0, end = ", size, ";");
      return;
    }
    line("const long steps = (", size, " + ", step, " - 1) / ", step, ";");
    line("const long begin = steps * (part % parts[2]) / parts[2] * ", step, ";");
    line("const long behind = steps * (part % parts[2] + 1) / parts[2] * ", step, ";");
    line("const long end = behind < ", size, " ? behind : ", size, ";");
  }

  // Until the loops of a phase.
  void open_phase(size_t stage, const char* count) {
    const Phase& phase = phases_.phases[stage];
    open_stage(stage);
    if (is_running(stage)) return open_rest(phase);
    open_accumulators(phase, count);
    if (is_running(stage + 1)) {
      open_accumulators(phases_.phases[stage + 1], count);
      open_bases(phases_.phases[stage + 1]);
    }
    line("{");
  }

  void open_row_loops() {
    open_range(loops() - 1, "V");
    open_reduced_loops(kept_loops(), loops() - 1);
  }
  // A row of threads for each kept element.
  void add_rows() {
    const size_t last = loops() - 1;
    if (shares_threads()) {  // a power of two, as the threads of a row are
      line("unsigned lanes = 1;");
      line("while (lanes < blockDim.x && lanes * (long)V < geometry[", last, "]) lanes *= 2;");
    }
    // Where a thread begins in a row, and how far it is from a turn to the next.
    const bool shares = shares_threads();
    line("const long first = ", shares ? "(threadIdx.x & (lanes - 1))" : "threadIdx.x",
         " * (long)V;");
    line("const long apart = ", shares ? "lanes" : "blockDim.x", " * (long)V;");
    line("const long kept = ", turns_before(kept_loops()), ";");
    line("const long groups = (kept + blockDim.y - 1) / blockDim.y;");
    open_held();
    open_running();
    open_groups("groups");
    // Threads without an element take part in barriers, on the last one.
    line("const bool here = group * blockDim.y + threadIdx.y < kept;");
    if (in_parts_ || kept_loops() > 0) {
      line("const long element = here ? group * blockDim.y + threadIdx.y : kept - 1;");
    }
    open_row("element", kept_loops());
    open_pointers("b", operands(), "", 0, kept_loops());
    open_positions("r", positions(), "", 0, kept_loops());
    define_all(phases_.before);
    add_fetches();
    for (size_t stage = 0; stage < phases_.phases.size(); ++stage) {
      const Phase& phase = phases_.phases[stage];
      open_phase(stage, "V");
      if (has_slots(stage)) line(kOpenSlot);
      open_row_loops();
      open_pointers_in_row(operands_of(phase), last);
      open_positions("q", positions_of(phase), "r", kept_loops(), last);
      add_turns(stage, [&] {
        add_neighbours(phase.stores, "if (here) ", [&] {
          define_loads(phase.loads);
          define_all(phase.instructions);
          accumulate(phase, "e");
        });
        if (!is_running(stage + 1)) return;
        const Phase& next = phases_.phases[stage + 1];
        add_running(next, "V", [&] {
          add_neighbours({}, "", [&] {
            define_loads(next.loads);
            define_all(next.instructions);
            accumulate(next, "e");
          });
        });
      });
      for (size_t loop = kept_loops(); loop < last; ++loop) line("}");
      line("}");
      end_turn(phase, "V", true);
      end_stage(phase);
      define_all(phase.after);
    }
    add_kept_stores();
    line("}");
  }

  // A column of threads for each kept element of the innermost loop; neighbours in x.
  void add_columns() {
    const size_t outer = kept_loops() - 1;
    const size_t last = loops() - 1;
    const size_t inner = last - 1;
    line("const long columns = geometry[", last, "];");
    line("const long strips = (columns + blockDim.x - 1) / blockDim.x;");
    line("const long rows = ", turns_before(outer), ";");
    if (in_parts_) line("const long kept = rows * columns;");
    open_running();
    open_groups("strips * rows");
    line("long column = group % strips * blockDim.x + threadIdx.x;");
    line("const bool here = column < columns;");
    line("if (!here) column = columns - 1;");
    if (in_parts_) line("const long element = group / strips * columns + column;");
    open_row("group / strips", outer);
    open_pointers("b", operands(), "", 0, outer);
    open_positions("r", positions(), "", 0, outer);
    define_all(phases_.before);
    for (size_t stage = 0; stage < phases_.phases.size(); ++stage) {
      const Phase& phase = phases_.phases[stage];
      open_phase(stage, "1");
      open_range(inner, "1");
      open_reduced_loops(outer, inner);
      line("#pragma unroll 4");
      line("for (long i", inner, " = begin + threadIdx.y; i", inner, " < end; i", inner,
           " += blockDim.y) {");
      open_pointers("p", operands_of(phase), "b", outer, last);
      open_positions("q", positions_of(phase), "r", outer, last);
      define_loads(phase.loads);
      define_all(phase.instructions);
      accumulate(phase, "0");
      end_turn(phase, "1", false);
      for (const Store& store : phase.stores) add_store("if (here) ", store);
      if (is_running(stage + 1)) {
        const Phase& next = phases_.phases[stage + 1];
        add_running(next, "1", [&] {
          for (const uint32_t i : next.instructions) {
            if (std::ranges::find(phase.instructions, i) == phase.instructions.end()) define(i);
          }
          accumulate(next, "0");
        });
      }
      for (size_t loop = outer; loop < last; ++loop) line("}");
      line("}");
      end_turn(phase, "1", true);
      end_stage(phase);
      define_all(phase.after);
    }
    add_kept_stores();
    line("}");
  }

  // Turns whose sum is taken in the type of the elements.
  static constexpr int kTurns = 16;

  const Phases phases_;
  const bool in_parts_;
  Held held_;
};

}  // namespace

KernelText render_cuda(const KernelSpec& kernel, bool in_parts) {
  CudaWriter writer(kernel, /*in_parts=*/false);
  KernelText made = writer.body();
  if (!in_parts) {
    made.text += writer.entry(made.name);
    return made;
  }
  KernelText staged = CudaWriter(kernel, true).body();
  // A name of its own: the same program may have the kernel that is never in parts.
  const std::string body = concat("body_", made.name), at_once = concat("at_once_", staged.name);
  made.text.replace(made.text.find(body), body.size(), at_once);
  staged.text += made.text + writer.entry(staged.name, at_once);
  return staged;
}

}  // namespace acc::codegen
