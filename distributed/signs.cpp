#include "distributed/signs.h"

#include <chrono>
#include <cstdint>
#include <ctime>
#include <span>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "csrc/base/check.h"

namespace acc::distributed {
namespace {

using std::chrono::milliseconds;
using std::chrono::system_clock;

constexpr const char* kSign = "alive";  // milliseconds since 1970

std::string key(const char* what, size_t rank) { return base::concat(what, "/", rank); }

// `found` is empty before, and as long as `keys`.
void get_all(c10d::Store& store, std::span<const std::string> keys,
             std::span<std::optional<std::string>> found) {
  if (keys.empty()) return;
  if (store.check({keys.begin(), keys.end()})) {
    const std::vector<std::vector<uint8_t>> values = store.multiGet({keys.begin(), keys.end()});
    for (size_t i = 0; i < keys.size(); ++i) found[i].emplace(values[i].begin(), values[i].end());
    return;
  }
  if (keys.size() == 1) return;
  const size_t half = keys.size() / 2;
  get_all(store, keys.first(half), found.first(half));
  get_all(store, keys.subspan(half), found.subspan(half));
}

// "2026-11-28 03:40:12 UTC"
std::string time_text(const std::string& sign) {
  const auto time = system_clock::time_point(milliseconds(std::stoll(sign)));
  const std::time_t seconds = system_clock::to_time_t(time);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

}  // namespace

Texts of_ranks(c10d::Store& store, const char* what, int size) {
  std::vector<std::string> keys;
  for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) keys.push_back(key(what, rank));
  Texts found(keys.size());
  get_all(store, keys, found);
  return found;
}

void give_sign(c10d::Store& store, int rank) {
  const auto now = system_clock::now().time_since_epoch();
  const auto time = std::chrono::duration_cast<milliseconds>(now).count();
  store.set(key(kSign, static_cast<size_t>(rank)), std::to_string(time));
}

Texts signs_of(c10d::Store& store, int size) { return of_ranks(store, kSign, size); }

std::string silent_between(const Texts& before, const Texts& now, int rank,
                           const std::function<std::string(int)>& name) {
  std::string text;
  for (size_t other = 0; other < now.size(); ++other) {
    if (other == static_cast<size_t>(rank) || now[other] != before[other]) continue;
    text += base::concat(text.empty() ? "" : ", ", name(static_cast<int>(other)),
                         " may have ended: it has given no sign of life");
    if (now[other].has_value()) text += " since " + time_text(*now[other]) + " by its clock";
  }
  return text;
}

}  // namespace acc::distributed
