#include "lazy/exec/kernels.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "kernels/codegen/render.h"
#include "kernels/jit/compile.h"
#include "lazy/plan/trial.h"

namespace acc::exec {
namespace {

using base::count;
using base::Counter;

// Threads get whole blocks, so that their vectors begin where cache lines do. Where vectors go
// along a reduced loop, a kept element is a block.
constexpr int64_t kBlock = 64;
bool goes_by_rows(const codegen::KernelSpec& kernel) {
  return kernel.reduced > 0 && !kernel.columns;
}

// Elements below which a second thread costs more than it brings, as in ATen
// (at::internal::GRAIN_SIZE), for kernels of one operation; they get fewer as operations get more.
constexpr int64_t kGrain = 32768;

// How long the runs of a plan together wait for its kernels, after the first. Most are there
// sooner; a second is what a user may notice, and what a slow compiler would cost goes on in the
// background.
constexpr std::chrono::milliseconds kPatience{1000};

// Names in a warning.
constexpr size_t kNamesShown = 4;

struct Compilation {
  std::shared_ptr<jit::Job> job;
  bool late = false;               // was waited for in vain
  std::vector<std::string> names;  // per kernel of the plan
  std::vector<codegen::HostFunction> functions;
};

Compilation& compilation_of(const plan::Plan& plan) {
  return *static_cast<Compilation*>(plan.compilation.get());
}

void request(plan::Plan& plan) {
  auto compilation = std::make_shared<Compilation>();
  std::vector<jit::Source> sources;
  for (const codegen::KernelSpec& kernel : plan.kernels) {
    codegen::KernelText text = codegen::render_host(kernel);
    compilation->names.push_back(text.name);
    sources.push_back({std::move(text.name), std::move(text.text)});
  }
  compilation->job = jit::compile(codegen::host_preamble(), std::move(sources));
  plan.compilation = std::move(compilation);
}

// Says once what keeps kernels from being made or kept.
void warn_once(const std::string& what) {
  static std::mutex mutex;
  static auto& told = *new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (what.empty() || !told.insert(what).second) return;
  }
  TORCH_WARN(what);
}

// Set in one process of several.
std::atomic<bool>& alike() {
  static std::atomic<bool> value = [] {
    const std::string processes = base::env::foreign("WORLD_SIZE");
    return !processes.empty() && processes != "1";
  }();
  return value;
}

bool chooses_by_time(const plan::Plan& plan) {
  if (base::env::deterministic() || alike()) return false;
  return std::ranges::none_of(plan.program.nodes, [](const graph::Node& node) {
    return runtime::is_deterministic(node.ambient);
  });
}

// Whether the kernels are there, or never will be.
bool await_kernels(const plan::Plan& plan) {
  Compilation& compilation = compilation_of(plan);
  if (!chooses_by_time(plan)) {
    compilation.job->wait();
    return true;
  }
  const bool done =
      compilation.late ? compilation.job->done() : compilation.job->wait_for(kPatience);
  if (!done && !compilation.late) base::count_keyed("jit", "late");
  compilation.late = !done;
  return done;
}

void use_what_is_there(plan::Plan& plan) {
  RECORD_FUNCTION("acc: wait for compiled kernels", c10::ArrayRef<const c10::IValue>());
  Compilation& compilation = compilation_of(plan);
  std::vector<bool> usable;
  for (const std::string& name : compilation.names) {
    compilation.functions.push_back(
        reinterpret_cast<codegen::HostFunction>(compilation.job->function(name)));
    usable.push_back(compilation.functions.back() != nullptr);
  }
  warn_once(compilation.job->error());
  warn_once(jit::cache_problem());
  plan::use_kernels(plan, usable);
  compilation.job.reset();
}

std::string operators_of(const plan::Plan& plan, const plan::Step& step) {
  std::string text;
  for (size_t i = 0; i < std::min(kNamesShown, step.nodes.size()); ++i) {
    text += base::concat(i == 0 ? "" : ", ", plan.program.nodes[step.nodes[i]].op->name);
  }
  if (step.nodes.size() <= kNamesShown) return text;
  return base::concat(text, " and ", step.nodes.size() - kNamesShown, " more");
}

// Puts kernels aside that are slower than what they replace, and says so.
void put_aside(plan::Plan& plan, const std::vector<plan::Trial::Slower>& slower) {
  std::string text = base::concat("[kernels] ", slower.size(), " of ", plan.fused.steps.size(),
                                  " steps of a plan are slower as generated kernels than as single "
                                  "operators, and run as these from now on:");
  std::vector<bool> apart(plan.fused.steps.size(), false);
  for (size_t i = 0; i < slower.size(); ++i) {
    const plan::Step& step = plan.fused.steps[slower[i].step];
    const std::string& name = compilation_of(plan).names[step.kernel];
    base::count_keyed("kernel_put_aside", name);
    apart[slower[i].step] = true;
    if (i >= kNamesShown) continue;
    text += base::concat(i == 0 ? " " : "; ", name, " (", operators_of(plan, step), ") took ",
                         slower[i].seconds * 1e3, " ms instead of ",
                         slower[i].unfused_seconds * 1e3, " ms");
  }
  text += slower.size() > kNamesShown ? "; and others." : ".";
  plan::take_apart(plan, apart);
  TORCH_WARN(text);
}

// The kernels are chosen: what they replace is not needed any more.
void settle(plan::Plan& plan) {
  plan.trial.reset();
  plan.unfused = plan::Schedule();
}

}  // namespace

plan::Schedule& choose_schedule(plan::Plan& plan) {
  if (plan.kernels.empty()) return plan.unfused;
  if (plan.compilation == nullptr) {
    if (plan.repeats) request(plan);
    plan.repeats = true;
    return plan.unfused;
  }
  if (compilation_of(plan).job != nullptr) {
    if (!await_kernels(plan)) return plan.unfused;
    use_what_is_there(plan);
    std::vector<bool> again;
    again.reserve(plan.program.nodes.size());
    for (const graph::Node& node : plan.program.nodes) again.push_back(node.again);
    plan.trial = std::make_shared<plan::Trial>(plan.unfused.steps, plan.fused.steps, again);
  }
  if (plan.trial == nullptr) return plan.fused;
  if (plan.trial->decided() || !chooses_by_time(plan)) {
    const std::vector<plan::Trial::Slower> slower = plan.trial->slower();
    if (plan.trial->decided() && !slower.empty()) put_aside(plan, slower);
    settle(plan);
    return plan.fused;
  }
  return plan.trial->next_is_fused() ? plan.fused : plan.unfused;
}

bool is_settled(const plan::Plan& plan, const plan::Schedule& schedule) {
  if (&schedule == &plan.fused) return plan.trial == nullptr;
  return plan.kernels.empty();
}

bool choose_alike() { return !alike().exchange(true); }

KernelCall::KernelCall(const plan::Plan& plan, const plan::Step& step,
                       const std::vector<library::Slot>& slots)
    : function_(compilation_of(plan).functions[step.kernel]),
      block_(goes_by_rows(plan.kernels[step.kernel]) ? 1 : kBlock) {
  for (const passes::Launch& launch : step.launches) {
    launches_.push_back({&launch, memory_.size(), numbers_.size(), blocks_});
    for (const passes::Launch::Operand& operand : launch.operands) {
      memory_.push_back(slots[operand.buffer].get());
    }
    numbers_.resize(numbers_.size() + launch.numbers.size());
    blocks_ += (launch.elements + block_ - 1) / block_;
  }
  pointers_.resize(memory_.size());
  const codegen::KernelSpec& kernel = plan.kernels[step.kernel];
  const auto operations = static_cast<int64_t>(kernel.instructions.size());
  grain_ = std::max(int64_t{1}, kGrain / block_ / step.launches.front().turns /
                                    std::max(int64_t{1}, operations / 4));
}

void KernelCall::set(std::span<const int64_t> values) {
  for (const Launch& launch : launches_) {
    for (size_t i = 0; i < launch.spec->operands.size(); ++i) {
      const size_t at = launch.pointers + i;
      pointers_[at] = static_cast<char*>(const_cast<void*>(memory_[at]->data())) +
                      launch.spec->operands[i].byte_offset;
    }
    for (size_t i = 0; i < launch.spec->numbers.size(); ++i) {
      const passes::Number& number = launch.spec->numbers[i];
      numbers_[launch.numbers + i] =
          number.immediate ? number.bits : values[static_cast<size_t>(number.bits)];
    }
  }
}

void KernelCall::launch() const {
  count(Counter::KernelLaunches, launches_.size());
  if (blocks_ <= grain_) return run_blocks(0, blocks_);
  at::parallel_for(0, blocks_, grain_,
                   [this](int64_t begin, int64_t end) { run_blocks(begin, end); });
}

void KernelCall::run_blocks(int64_t begin, int64_t end) const {
  auto launch = std::ranges::upper_bound(launches_, begin, {}, &Launch::first_block) - 1;
  for (; launch != launches_.end() && launch->first_block < end; ++launch) {
    const int64_t elements = launch->spec->elements;
    const int64_t first = std::max(int64_t{0}, (begin - launch->first_block) * block_);
    const int64_t last = std::min(elements, (end - launch->first_block) * block_);
    function_(pointers_.data() + launch->pointers, launch->spec->geometry.data(),
              numbers_.data() + launch->numbers, first, last);
  }
}

}  // namespace acc::exec
