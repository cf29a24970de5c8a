#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
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
  // Of a new group: what was missed before only once is not its business.
  MissedKernels();

  // Tells the other ranks which kernels this one has missed, unless another has told of them.
  // `rank`: as "rank 5".
  void tell(c10d::Store& store, const std::string& rank);
  // Hears what was told, and returns why the group is of no more use; "" while it is.
  std::string hear(c10d::Store& store, const std::string& rank);

 private:
  const size_t before_;
  size_t seen_ = 0;
  int64_t heard_ = 0;
  std::vector<int64_t> awaited_;  // what was counted and is not there yet
  std::vector<std::pair<std::string, std::string>> missed_;  // kernels, and a rank without each
};

}  // namespace acc::distributed
