#include "distributed/missed_kernels.h"

#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/session/session.h"

namespace acc::distributed {
namespace {

std::string key_of(int rank) { return base::concat("missed_kernels/", rank); }

}  // namespace

MissedKernels::MissedKernels() : before_(session::missed_kernels(0).size()) {}

void MissedKernels::show(c10d::Store& store, int rank) {
  std::string names;
  const std::vector<exec::MissedKernel> found = session::missed_kernels(seen_);
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].for_good || seen_ + i >= before_) names += " " + found[i].name;
  }
  if (!names.empty()) store.set(key_of(rank), own_ + names);
  own_ += names;
  seen_ += found.size();
}

std::string MissedKernels::compare(c10d::Store& store, int rank, int size) {
  for (const int other : std::set{(rank + 1) % size, (rank + size - 1) % size}) {
    if (!store.check({key_of(other)})) continue;
    std::istringstream missed(store.get_to_str(key_of(other)));
    for (std::string kernel; missed >> kernel;) {
      if (!session::relies_on_kernel(kernel)) continue;
      return base::concat(
          "rank ", other, " has run without the generated kernel ", kernel, ", which rank ", rank,
          " uses: what both compute, like the update of parameters, differs in its last bits from "
          "there on. The log of rank ",
          other,
          " says why it had none. Go on from a checkpoint when that is mended; ACC_MODE=nofuse on "
          "any rank does without such kernels on all.");
    }
  }
  return "";
}

}  // namespace acc::distributed
