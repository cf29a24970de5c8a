#pragma once

#include <string>

namespace acc::exec {

// A kernel that this process has done without: it could not be made, or, once and not for good,
// Ctrl-C came before it was and others trained with this process.
struct MissedKernel {
  std::string name;
  bool for_good;
  bool operator==(const MissedKernel&) const = default;
};

}  // namespace acc::exec
