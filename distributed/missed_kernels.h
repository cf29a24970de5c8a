#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

// Ranks agree on whether they have generated kernels when they make a group. A kernel that one rank
// misses later and another one uses makes replicas differ, so it ends the group; where all miss it
// they stay alike.
namespace acc::distributed {

class MissedKernels {
 public:
  // Tells the other ranks which kernels this one has missed since it told them last, and hears of
  // theirs. Returns why the group is of no more use; "" while it is. Few requests to the store.
  std::string exchange(c10d::Store& store, int rank);

 private:
  struct Missed {
    std::string rank;
    std::string kernel;
  };

  size_t told_ = 0;
  uint64_t heard_ = 0;  // messages of the group, in which each has a number
  std::vector<Missed> missed_;
};

}  // namespace acc::distributed
