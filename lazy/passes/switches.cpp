#include "lazy/passes/switches.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "csrc/base/check.h"
#include "csrc/base/env.h"

namespace acc::passes {
namespace {

// In the order of Pass.
constexpr std::array kNames{"dce",        "lists",     "split",  "cse",       "copies",
                            "rows",       "widen",     "layout", "products",  "epilogues",
                            "accumulate", "transfers", "fuse",   "recompute", "batch",
                            "order",      "alias"};

std::atomic<uint32_t> skipped{0};
std::once_flag from_environment;

std::string all_names() {
  std::string text;
  for (const char* name : kNames) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

uint32_t parse(std::string_view names) {
  uint32_t mask = 0;
  while (!names.empty()) {
    const size_t end = std::min(names.find(','), names.size());
    const std::string_view name = names.substr(0, end);
    names.remove_prefix(std::min(end + 1, names.size()));
    size_t i = 0;
    while (i < kNames.size() && name != kNames[i]) ++i;
    ACC_CHECK(i < kNames.size(), "[passes] ACC_SKIP_PASSES names '", std::string(name),
              "', which is no pass. There are: ", all_names(), ".");
    mask |= 1U << i;
  }
  return mask;
}

}  // namespace

bool enabled(Pass pass) {
  std::call_once(from_environment, [] { skipped = parse(base::env::skip_passes()); });
  return (skipped.load(std::memory_order_relaxed) >> static_cast<unsigned>(pass) & 1U) == 0;
}

void skip(const std::string& names) {
  enabled(Pass::kDce);
  skipped = parse(names);
}

}  // namespace acc::passes
