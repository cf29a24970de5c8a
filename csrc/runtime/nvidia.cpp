#include "csrc/runtime/nvidia.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "csrc/base/check.h"

namespace acc::runtime {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The first word of digits and dots in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15".
std::string read_driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    const bool number =
        std::all_of(word.begin(), word.end(), [](char c) { return is_digit(c) || c == '.'; });
    if (number && is_digit(word.front()) && word.find('.') != std::string::npos) return word;
  }
  return "";
}

// The number that the text begins with.
int major_of(std::string_view version) {
  int major = 0;
  for (const char c : version) {
    if (!is_digit(c)) break;
    major = major * 10 + (c - '0');
  }
  return major;
}

// What follows "code=" in nvcc's options: "sm_86", "sm_90a", "compute_75".
std::vector<std::string_view> codes(std::string_view options) {
  constexpr std::string_view kKey = "code=";
  constexpr std::string_view kEnds = "; \t\n";
  constexpr std::string_view kApart = "[],";
  std::vector<std::string_view> found;
  for (size_t at = options.find(kKey); at != options.npos; at = options.find(kKey, at)) {
    at += kKey.size();
    std::string_view list = options.substr(at, options.find_first_of(kEnds, at) - at);
    while (!list.empty()) {
      const size_t end = std::min(list.find_first_of(kApart), list.size());
      if (end > 0) found.push_back(list.substr(0, end));
      list.remove_prefix(std::min(end + 1, list.size()));
    }
  }
  return found;
}

void add(std::string& list, std::string_view item) {
  list += base::concat(list.empty() ? "" : ", ", item);
}

// The devices that torch's kernels do not run on, and what to do about them.
std::optional<std::string> unsupported(const GpuProbe& probe) {
  const std::vector<std::string_view> known = codes(probe.architectures);
  if (known.empty()) return std::nullopt;
  std::string unfit;
  std::string fit;
  for (size_t i = 0; i < probe.capabilities.size(); ++i) {
    if (runs_on(probe.capabilities[i], probe.architectures)) {
      add(fit, base::concat("GPU ", i));
    } else {
      add(unfit, base::concat("GPU ", i, " is sm_", probe.capabilities[i]));
    }
  }
  if (unfit.empty()) return std::nullopt;
  std::string built;
  for (const std::string_view code : known) add(built, code);
  const std::string hide =
      fit.empty() ? "Install"
                  : base::concat("Leave only ", fit, " visible (CUDA_VISIBLE_DEVICES), or install");
  return base::concat(unfit, ", and this torch was built for ", built, ". ", hide,
                      " a build of torch for it, and build acc again.");
}

}  // namespace

GpuProbe probe_gpu() {
  GpuProbe probe;
  probe.driver_version = read_driver_version();
  probe.present = !probe.driver_version.empty() || access("/dev/nvidia0", F_OK) == 0;
  probe_cuda(probe);
  return probe;
}

int required_driver(int cuda_version) {
  // From NVIDIA's table of CUDA toolkits and the drivers that support them within a major version.
  switch (cuda_version / 1000) {
    case 11:
      return 450;
    case 12:
      return 525;
    case 13:
      return 580;
    default:
      return 0;
  }
}

bool runs_on(int capability, std::string_view options) {
  constexpr std::string_view kMachine = "sm_";
  constexpr std::string_view kText = "compute_";
  return std::ranges::any_of(codes(options), [&](std::string_view code) {
    if (code.starts_with(kText)) return major_of(code.substr(kText.size())) <= capability;
    if (!code.starts_with(kMachine)) return false;
    const int number = major_of(code.substr(kMachine.size()));
    if (!is_digit(code.back())) return number == capability;
    return number / 10 == capability / 10 && number <= capability;
  });
}

std::optional<std::string> unusable_beside(const GpuProbe& probe) {
  if (probe.devices == 0 || unusable_gpu(probe)) return std::nullopt;
  return unsupported(probe);
}

std::optional<std::string> unusable_gpu(const GpuProbe& probe) {
  if (!probe.present || probe.none_visible) return std::nullopt;
  if (probe.devices > 0) {
    // Who names no device uses the first.
    const bool fits =
        probe.capabilities.empty() || runs_on(probe.capabilities[0], probe.architectures);
    return fits ? std::nullopt : unsupported(probe);
  }
  const std::string driver =
      probe.driver_version.empty() ? "of unknown version" : probe.driver_version;
  if (!probe.built_with_cuda) {
    return base::concat("its driver is ", driver,
                        ", but acc was built without CUDA. Install a CUDA build of torch and build "
                        "acc again (make develop).");
  }
  const int required = required_driver(probe.cuda_version);
  const std::string cuda =
      base::concat(probe.cuda_version / 1000, ".", probe.cuda_version % 1000 / 10);
  const int major = major_of(probe.driver_version);
  if (required != 0 && major != 0 && major < required) {
    return base::concat("its driver is ", driver, ", and CUDA ", cuda, " needs ", required,
                        " or newer. Update the driver, or install a torch built for an older CUDA "
                        "and build acc again.");
  }
  return base::concat(
      "its driver is ", driver, " (CUDA ", cuda, " needs ", required, " or newer), and CUDA says: ",
      probe.error.empty() ? "no CUDA-capable device is detected" : probe.error,
      ". Check that nvidia-smi works for this user; a container has to be started with the "
      "GPU (docker run --gpus all).");
}

}  // namespace acc::runtime
