#include "distributed/missed_kernels.h"

#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/session/session.h"

namespace acc::distributed {
namespace {

// How many kernels were told of, and behind it a number each with the name and a rank.
constexpr const char* kTold = "missed_kernels";

std::string told(int64_t number) { return base::concat(kTold, "/", number); }

}  // namespace

MissedKernels::MissedKernels() : before_(session::missed_kernels(0).size()) {}

void MissedKernels::tell(c10d::Store& store, const std::string& rank) {
  const std::vector<exec::MissedKernel> found = session::missed_kernels(seen_);
  for (const exec::MissedKernel& each : found) {
    const bool concerns = each.for_good || seen_ >= before_;
    if (concerns && store.compareSet("missed_kernel/" + each.name, "", rank) == rank) {
      store.set(told(store.add(kTold, 1)), each.name + " " + rank);
    }
    ++seen_;  // a store that has thrown is asked again
  }
}

std::string MissedKernels::hear(c10d::Store& store, const std::string& rank) {
  for (const int64_t count = store.add(kTold, 0); heard_ < count;) awaited_.push_back(++heard_);
  std::erase_if(awaited_, [&](int64_t number) {
    if (!store.check({told(number)})) return false;  // in a moment
    std::istringstream text(store.get_to_str(told(number)));
    auto& [kernel, by] = missed_.emplace_back();
    text >> kernel >> std::ws;
    std::getline(text, by);
    return true;
  });
  for (const auto& [kernel, by] : missed_) {
    if (!session::relies_on_kernel(kernel)) continue;
    return base::concat(
        by, " has run without the generated kernel ", kernel, ", which ", rank,
        " uses: what both compute, like the update of parameters, differs in its last bits from "
        "there on. The log of rank ",
        by,
        " says why it had none. Go on from a checkpoint when that is mended; ACC_MODE=nofuse on "
        "any rank does without such kernels on all.");
  }
  return "";
}

}  // namespace acc::distributed
