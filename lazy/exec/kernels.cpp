#include "lazy/exec/kernels.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/ambient.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "kernels/codegen/cuda_launch.h"
#include "kernels/codegen/render.h"
#include "kernels/device/device_kernels.h"
#include "kernels/jit/compile.h"
#include "kernels/jit/files.h"
#include "lazy/plan/trial.h"

namespace acc::exec {
namespace {

// How long the runs of a plan together wait for its kernels, after the first. Most are there
// sooner; a second is what a user may notice, and what a slow compiler would cost goes on in the
// background.
constexpr std::chrono::milliseconds kPatience{1000};

// Operators draw random numbers for a GPU on the host, and copy them: so many bytes take as long as
// a compiler, or longer.
constexpr uint64_t kDrawnBytes = uint64_t{4} << 20U;

// Names in a warning.
constexpr size_t kNamesShown = 4;

// After so many of these waits a terminal shows how far it is.
constexpr int kSilent = 3;

// A kernel that does nothing, to see whether there can be any.
constexpr const char* kNothing =
    "extern \"C\" __attribute__((visibility(\"default\"))) void acc_nothing() {}\n";

// What became of the kernels that this process needed, for other processes that train with it.
struct Needed {
  std::mutex mutex;
  std::unordered_set<std::string> used;
  std::vector<MissedKernel> missed;

  bool is_missed(const std::string& name) const {
    return std::ranges::find(missed, name, &MissedKernel::name) != missed.end();
  }

  // What was missed once, and then for good, is there twice: groups that were made in between hear
  // of the second time only.
  void miss(const std::string& name, bool for_good) {
    const std::lock_guard lock(mutex);
    const MissedKernel made{name, for_good};
    if (std::ranges::find(missed, made) == missed.end()) missed.push_back(made);
  }

  void use(const std::string& name) {
    const std::lock_guard lock(mutex);
    used.insert(name);
  }
};

Needed& needed() {
  static Needed& instance = *new Needed;  // threads may ask when the process ends
  return instance;
}

struct Compilation {
  std::shared_ptr<jit::Job> job;
  bool late = false;               // was waited for in vain
  std::vector<std::string> names;  // per kernel of the plan
  std::vector<void*> functions;
};

Compilation& compilation_of(const plan::Plan& plan) {
  return *static_cast<Compilation*>(plan.compilation.get());
}

// ACC_KERNEL_TEXTS: one file for each kernel, named after it; one that is there is the same.
void keep_texts(const plan::Plan& plan) {
  const std::string directory = base::env::kernel_texts();
  if (directory.empty()) return;
  for (uint32_t i = 0; i < plan.kernels.size(); ++i) {
    const codegen::KernelText kernel = gpu_text(plan, i);
    const std::string path = base::concat(directory, "/", kernel.name, ".cu");
    if (jit::write_file(path, kernel.text) || errno == EEXIST) continue;
    runtime::warn_once(base::concat("[kernels] ", path,
                                    " cannot be written: ", jit::error_text(errno),
                                    ". Set ACC_KERNEL_TEXTS to a directory of your own."));
  }
}

void request(plan::Plan& plan, c10::DeviceIndex device) {
  const device::DeviceKernels* on_device = device::device_kernels(device);
  auto compilation = std::make_shared<Compilation>();
  std::vector<jit::Source> sources;
  for (uint32_t i = 0; i < plan.kernels.size(); ++i) {
    codegen::KernelText text =
        on_device == nullptr ? codegen::render_host(plan.kernels[i]) : gpu_text(plan, i);
    compilation->names.push_back(text.name);
    sources.push_back({std::move(text.name), std::move(text.text)});
  }
  const runtime::GilHold hold;  // the environment is read, which Python's os.environ may change
  compilation->job =
      on_device == nullptr
          ? jit::compile(codegen::host_preamble(), std::move(sources))
          : jit::compile(codegen::cuda_preamble(), std::move(sources), on_device->toolchain());
  plan.compilation = std::move(compilation);
  keep_texts(plan);
}

bool chooses_by_time(const plan::Plan& plan) {
  if (base::env::deterministic() || runtime::chooses_alike()) return false;
  return std::ranges::none_of(plan.program.nodes, [](const graph::Node& node) {
    return runtime::is_deterministic(node.ambient);
  });
}

bool draws_much(const plan::Plan& plan) {
  return for_gpus() && plan::drawn_bytes(plan) >= kDrawnBytes;
}

// One line of a terminal for those who wait, and nothing where standard error goes elsewhere.
class ProgressLine {
 public:
  ProgressLine() = default;
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() {
    if (shown_) write("");
  }

  void show(const std::string& text) {
    if (isatty(STDERR_FILENO) == 0) return;
    write(text);
    shown_ = true;
  }

 private:
  // Over what is there.
  static void write(const std::string& text) {
    const std::string line = base::concat("\r\033[K", text);
    // What a terminal that is gone is not told is lost.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  }

  bool shown_ = false;
};

// Until the kernels are there, or never will be, however long. False: the user does not want to
// wait for them, and once more goes without.
bool await_all(const Compilation& compilation) {
  ProgressLine progress;
  const jit::Job& job = *compilation.job;
  for (int waits = 1; !job.wait_for(kPatience); ++waits) {
    if (runtime::interrupted()) {
      if (!runtime::chooses_alike()) return false;
      for (const std::string& name : compilation.names) needed().miss(name, /*for_good=*/false);
      return false;
    }
    if (waits < kSilent) continue;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(waits * kPatience);
    progress.show(base::concat("[kernels] compiled ", job.finished(), " of ", job.size(), ", ",
                               seconds.count(), " s"));
  }
  return true;
}

// Whether the kernels are there, or never will be.
bool await_kernels(const plan::Plan& plan) {
  Compilation& compilation = compilation_of(plan);
  // Interrupted: once more unfused, and then the user has it.
  if (!chooses_by_time(plan) || draws_much(plan)) return await_all(compilation);
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
    compilation.functions.push_back(compilation.job->function(name));
    usable.push_back(compilation.functions.back() != nullptr);
    if (usable.back()) {
      needed().use(name);
    } else {
      needed().miss(name, /*for_good=*/true);
    }
  }
  std::string error = compilation.job->error();
  if (!error.empty() && runtime::chooses_alike()) {
    error +=
        " Where another process of this training has that kernel, training ends: what both "
        "compute, like the update of parameters, would differ in its last bits.";
  }
  runtime::warn_once(error);
  runtime::warn_once(jit::cache_problem());
  plan::use_kernels(plan, usable);
  // In other processes of the training they may be there.
  plan.to_be_plain = std::ranges::none_of(usable, std::identity()) && !runtime::chooses_alike();
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

// The compiler is done: from now on the kernels are compared with what they replace, but for those
// that would have to be compared with draws on the host.
void take_kernels(plan::Plan& plan) {
  use_what_is_there(plan);
  if (for_gpus()) plan::keep_drawing(plan);
  plan.trial = std::make_shared<plan::Trial>(plan.unfused.steps, plan.fused.steps);
}

// The kernels are chosen: what they replace is not needed any more.
void settle(plan::Plan& plan) {
  plan.trial.reset();
  plan.unfused = plan::Schedule();
}

}  // namespace

plan::Schedule& choose_schedule(plan::Plan& plan, c10::DeviceIndex device) {
  if (plan.kernels.empty()) return plan.unfused;
  if (plan.compilation == nullptr) {
    // One process of several may cut its steps where the others do not, by reading a loss: what
    // they all compute, the update, is a plan of its own there, and is to have the same kernels.
    const bool at_once = runtime::chooses_alike() || draws_much(plan);
    if (std::exchange(plan.repeats, true) || at_once) request(plan, device);
    if (!at_once) return plan.unfused;
  }
  if (compilation_of(plan).job != nullptr) {
    if (!await_kernels(plan)) return plan.unfused;
    take_kernels(plan);
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

plan::Schedule& await_fused(plan::Plan& plan, c10::DeviceIndex device) {
  if (plan.kernels.empty()) return plan.unfused;
  if (plan.compilation == nullptr) request(plan, device);
  if (compilation_of(plan).job != nullptr) {
    if (!await_all(compilation_of(plan))) return plan.unfused;
    take_kernels(plan);
  }
  return plan.fused;
}

std::string kernel_name(const plan::Plan& plan, uint32_t kernel) {
  return compilation_of(plan).names[kernel];
}

bool is_settled(const plan::Plan& plan, const plan::Schedule& schedule) {
  if (plan.compared) return false;
  if (&schedule == &plan.fused) return plan.trial == nullptr;
  return plan.kernels.empty();
}

bool may_be_compared(plan::Plan& plan) {
  if (!plan.has_run || !chooses_by_time(plan)) return false;
  if (plan.kernels.empty()) return std::exchange(plan.repeats, true);
  return plan.compilation != nullptr && compilation_of(plan).job == nullptr &&
         plan.trial == nullptr;
}

std::string kernels_problem() {
  if (!base::env::fuses()) return base::concat("ACC_MODE=", base::env::name(base::env::mode()));
  if (for_gpus()) return "";  // their compiler comes with torch
  std::shared_ptr<jit::Job> job;
  {
    const runtime::GilHold hold;  // as in `request`
    job = jit::compile(codegen::host_preamble(), {{"acc_nothing", kNothing}});
  }
  while (!job->wait_for(kPatience)) {
    if (runtime::interrupted()) runtime::handle_signals();
  }
  return job->error();
}

std::vector<MissedKernel> missed_kernels(size_t from) {
  const std::lock_guard lock(needed().mutex);
  const std::vector<MissedKernel>& missed = needed().missed;
  if (from >= missed.size()) return {};
  return {missed.begin() + static_cast<std::ptrdiff_t>(from), missed.end()};
}

bool relies_on_kernel(const std::string& name) {
  const std::lock_guard lock(needed().mutex);
  return needed().used.contains(name) && !needed().is_missed(name);
}

void forget_needed_kernels() {
  const std::lock_guard lock(needed().mutex);
  needed().used.clear();
  needed().missed.clear();
}

bool for_gpus() { return device::are_of_gpus(); }

codegen::KernelText gpu_text(const plan::Plan& plan, uint32_t kernel) {
  const codegen::KernelSpec& spec = plan.kernels[kernel];
  const bool in_parts = std::ranges::any_of(plan.fused.steps, [&](const plan::Step& step) {
    return step.kernel == kernel && std::ranges::any_of(step.launches, [&](const auto& launch) {
             return codegen::has_parts(spec, {launch.geometry.data(), spec.loops});
           });
  });
  return codegen::render_cuda(spec, in_parts);
}

void* function_of(const plan::Plan& plan, uint32_t kernel) {
  return compilation_of(plan).functions[kernel];
}

}  // namespace acc::exec
