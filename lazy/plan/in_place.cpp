#include "lazy/plan/in_place.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "lazy/passes/elementwise.h"

namespace acc::plan {
namespace {

// Loops of one turn step nowhere.
bool same_steps(std::span<const int64_t> a, std::span<const int64_t> b,
                std::span<const int64_t> sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

// Kernels without reductions load all that they need at an element before they store there; those
// with some go through the elements again after they stored to a result.
bool kernel_may(const codegen::KernelSpec& kernel, const std::vector<passes::Launch>& launches,
                uint32_t made, uint32_t read) {
  if (kernel.reduced > 0) return false;
  const auto concerns = [&](const passes::Launch::Operand& operand) {
    return operand.buffer == made || operand.buffer == read;
  };
  const passes::Launch* only = nullptr;  // launches of a step run side by side
  for (const passes::Launch& launch : launches) {
    if (std::ranges::none_of(launch.operands, concerns)) continue;
    if (only != nullptr) return false;
    only = &launch;
  }
  if (only == nullptr) return false;
  const std::span sizes(only->geometry.data(), kernel.loops);
  // Fewer elements than turns: some are computed from several.
  const int64_t turns =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  if (turns != only->elements) return false;
  const auto steps_of = [&](size_t operand) {
    return std::span(only->geometry.data() + kernel.loops * (operand + 1), kernel.loops);
  };
  const size_t count = only->operands.size();
  size_t first = count;
  for (size_t i = 0; i < count; ++i) {
    const passes::Launch::Operand& operand = only->operands[i];
    if (!concerns(operand)) continue;
    if (operand.stored != (operand.buffer == made)) return false;
    if (first == count) first = i;
    if (operand.byte_offset != only->operands[first].byte_offset ||
        kernel.operands[i].dtype != kernel.operands[first].dtype ||
        !same_steps(steps_of(i), steps_of(first), sizes)) {
      return false;
    }
  }
  return true;
}

// Elementwise operators work in place too, with the kernel that they have for out=.
bool operator_may(const graph::Graph& graph, const graph::Node& node, uint32_t made,
                  uint32_t read) {
  if (!node.op->pointwise || node.op->out_handle == nullptr) return false;
  const auto elementwise = passes::as_elementwise(graph, node);
  if (!elementwise.has_value()) return false;
  const passes::Nest& nest = elementwise->nest;
  const passes::Access& result = nest.accesses.back();
  if (result.buffer != made) return false;
  size_t reads = 0;
  for (const passes::Access& access : nest.accesses) {
    if (access.buffer != read) continue;
    ++reads;
    if (access.dtype != result.dtype || access.offset != result.offset ||
        !same_steps(access.strides, result.strides, nest.sizes)) {
      return false;
    }
  }
  // Operands that the formula does not read are the kernel's own affair.
  const std::vector<graph::Use> all = graph::uses(graph, node);
  return static_cast<size_t>(std::ranges::count(all, read, &graph::Use::buffer)) == reads;
}

}  // namespace

bool may_overwrite(const Plan& plan, const Step& step, uint32_t made, uint32_t read) {
  if (step.kernel != kNoKernel) {
    return kernel_may(plan.kernels[step.kernel], step.launches, made, read);
  }
  return operator_may(plan.program, plan.program.nodes[step.nodes[0]], made, read);
}

}  // namespace acc::plan
