#include "distributed/missed_kernels.h"

#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "csrc/base/check.h"
#include "lazy/session/session.h"

namespace acc::distributed {

std::string MissedKernels::exchange(c10d::Store& store, int rank) {
  const std::vector<std::string> own = session::missed_kernels(told_);
  std::string message = own.empty() ? "" : std::to_string(rank);
  for (const std::string& kernel : own) message += " " + kernel;
  for (;;) {
    const std::string key = base::concat("missed_kernels/", heard_ + 1);
    if (message.empty() && !store.check({key})) break;
    const std::string told =
        message.empty() ? store.get_to_str(key) : store.compareSet(key, "", message);
    ++heard_;
    if (told == message) {
      told_ += own.size();
      message.clear();
      continue;
    }
    std::istringstream words(told);
    std::string other;
    words >> other;
    for (std::string kernel; words >> kernel;) missed_.push_back({other, kernel});
  }
  for (const auto& [other, kernel] : missed_) {
    if (!session::relies_on_kernel(kernel)) continue;
    return base::concat(
        "rank ", other, " has run without the generated kernel ", kernel, ", which rank ", rank,
        " uses: what both compute, like the update of parameters, differs in its last bits from "
        "there on. The log of rank ",
        other,
        " says why it had none. Go on from a checkpoint when that is mended; ACC_MODE=nofuse on "
        "any rank does without such kernels on all.");
  }
  return "";
}

}  // namespace acc::distributed
