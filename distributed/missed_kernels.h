#pragma once

#include <cstddef>
#include <string>

namespace c10d {
class Store;
}

// Ranks agree on whether they have generated kernels when they make a group. A kernel that one rank
// misses later and another one uses makes replicas differ, so it ends the group; where all miss it
// they stay alike.
namespace acc::distributed {

class MissedKernels {
 public:
  // Of a new group: what was missed before only once is not its business.
  MissedKernels();

  // Shows the other ranks which kernels this one has missed.
  void show(c10d::Store& store, int rank);
  // Looks at what its neighbours show: where one rank has what another misses, so it is with two
  // neighbours, once those between have needed it. Returns why the group is of no more use; ""
  // while it is.
  static std::string compare(c10d::Store& store, int rank, int size);

 private:
  const size_t before_;
  size_t seen_ = 0;
  std::string own_;  // their names, a blank before each
};

}  // namespace acc::distributed
