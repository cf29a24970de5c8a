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

int major_of(const std::string& version) {
  int major = 0;
  for (const char c : version) {
    if (!is_digit(c)) break;
    major = major * 10 + (c - '0');
  }
  return major;
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

std::optional<std::string> unusable_gpu(const GpuProbe& probe) {
  if (!probe.present || probe.none_visible || probe.devices > 0) return std::nullopt;
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
