#include "distributed/behind.h"

#include <atomic>

#include "csrc/base/check.h"
#include "csrc/runtime/errors.h"
#include "lazy/record/source.h"
#include "lazy/record/watch.h"

namespace acc::distributed {
namespace {

std::atomic<std::chrono::milliseconds> too_long{std::chrono::seconds(10)};

thread_local std::string on_behalf_of;  // "" of nothing

}  // namespace

Behind::Behind(const std::string& what) : first_(on_behalf_of.empty()) {
  if (first_) on_behalf_of = what + record::source_text(record::source_here());
}

Behind::~Behind() {
  if (first_) on_behalf_of.clear();
}

bool waits_too_long(std::chrono::steady_clock::time_point since) {
  return !on_behalf_of.empty() && std::chrono::steady_clock::now() - since >= too_long.load();
}

void tell_of_wait(const std::string& collective) {
  const auto seconds = std::chrono::duration<double>(too_long.load()).count();
  runtime::warn_once(base::concat(
      "[torch.distributed] ", on_behalf_of, " has waited for ", seconds,
      " s: what this process has recorded before is finished first, and ", collective,
      " is not over. Where another rank comes to that only behind what it does with this one, both "
      "wait until the group's timeout: let it call that first (async_op=True), or call this one "
      "here before it."));
}

void tell_of_waits_after(std::chrono::milliseconds time) { too_long = time; }

}  // namespace acc::distributed
