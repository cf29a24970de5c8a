#include "kernels/codegen/host_writer.h"

#include <algorithm>

#include "kernels/codegen/host_math.h"
#include "lazy/graph/dtype.h"

namespace acc::codegen {
namespace {

using base::concat;
namespace dtype = graph::dtype;

bool is_host_math(const std::string& name) {
  static const std::vector<std::string>& names = *new std::vector(host_math_names());
  return std::ranges::binary_search(names, name);
}

// Of what a turn draws, in the preamble.
const char* words_of(graph::Fn fn) {
  return fn == graph::Fn::kNormal ? "Pairs" : fn == graph::Fn::kInteger ? "Wide" : "Words";
}

}  // namespace

KernelText HostWriter::finish() const {
  return Writer::finish("extern \"C\" __attribute__((visibility(\"default\"))) void ",
                        "(char* const* pointers, const long* geometry, const long* numbers, "
                        "long begin, long end)");
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

void HostWriter::add_steps() {
  for (size_t i = 0; i < kernel_.operands.size(); ++i) {
    if (kernel_.operands[i].walk != Walk::kStrided) continue;
    line("const long step", i, " = ", stride(i, loops() - 1), ";");
  }
}

std::string HostWriter::step_of(size_t operand) const {
  return kernel_.operands[operand].walk == Walk::kStrided ? concat("step", operand) : "1";
}

std::string HostWriter::turn() const { return vectors_ == 1 ? "W" : concat(vectors_, " * W"); }

std::string HostWriter::place() const {
  return vector_ == 0 ? "at" : concat("(at + ", vector_, " * W)");
}

std::string HostWriter::value(size_t i) const {
  return vector_ == 0 || uniform_[i] ? Writer::value(i) : concat("v", i, "_", vector_);
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

std::string HostWriter::count(size_t i) const {
  if (kernel_.positions[i].walk == Walk::kBroadcast) return concat("splat_F32(q", i, ")");
  return concat("count_F32(q", i, " + ", place(), " * t", i, ", t", i, ")");
}

// A vector of words is a quarter as many blocks, too few to compute side by side: so a turn's words
// are drawn together.
void HostWriter::draw_ahead() {
  draws_ahead_ = true;
  for (size_t i = 0; i < kernel_.instructions.size(); ++i) {
    const Instruction& instruction = kernel_.instructions[i];
    if (!graph::is_draw(instruction.fn) || uniform_[i]) continue;
    const size_t at = instruction.index;
    line(words_of(instruction.fn), "<", turn(), "> words", i, "(q", at, " + at * t", at, ", t", at,
         ", ", stream(i), ");");
  }
}

std::string HostWriter::drawn(size_t i) const {
  const Instruction& instruction = kernel_.instructions[i];
  const size_t at = instruction.index;
  if (uniform_[i]) return draw_here(i, concat("q", at), "0");
  if (draws_ahead_) {
    return concat(graph::name_of(instruction.fn), "_(words", i, ", ", vector_, " * W", bound(i),
                  ")");
  }
  return draw_here(i, concat("q", at, " + ", place(), " * t", at), concat("t", at));
}

std::string HostWriter::draw_here(size_t i, const std::string& first,
                                  const std::string& step) const {
  const graph::Fn fn = kernel_.instructions[i].fn;
  return concat(graph::name_of(fn), "_(", words_of(fn), "<2 * W>(", first, ", ", step, ", ",
                stream(i), "), 0", bound(i), ")");
}

std::string HostWriter::name_of(graph::Fn fn, uint8_t type) const {
  const std::string name = graph::name_of(fn);
  return name + (type == dtype::kF32 && is_host_math(name) ? "_f32" : "_");
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
