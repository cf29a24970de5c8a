#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

// Signs of life: each rank of a group renews a time in the group's store, which others read only
// when something has failed.
namespace acc::distributed {

// Each rank's text under `what` in the store, by rank; nothing where there is none. As many
// requests for many ranks as for one, but for those that find out who is missing.
using Texts = std::vector<std::optional<std::string>>;
Texts of_ranks(c10d::Store& store, const char* what, int size);

void give_sign(c10d::Store& store, int rank);
Texts signs_of(c10d::Store& store, int size);

// What to say of the ranks other than `rank` whose sign is the same in both; empty where there are
// none. The time is that of their own clocks: those of two hosts may differ. `name`: of a rank.
std::string silent_between(const Texts& before, const Texts& now, int rank,
                           const std::function<std::string(int)>& name);

}  // namespace acc::distributed
