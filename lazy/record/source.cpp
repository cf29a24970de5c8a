#include "lazy/record/source.h"

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "csrc/base/check.h"

namespace acc::record {
namespace {

std::mutex mutex;
using Place = std::tuple<std::string, int, std::string>;
std::map<Place, uint32_t>& numbers() {
  static std::map<Place, uint32_t> map;
  return map;
}
std::vector<const Place*>& places() {
  static std::vector<const Place*> list{nullptr};
  return list;
}

}  // namespace

uint32_t intern_source(const std::string& file, int line, const std::string& function) {
  std::lock_guard lock(mutex);
  const auto [found, added] =
      numbers().try_emplace(Place{file, line, function}, static_cast<uint32_t>(places().size()));
  if (added) places().push_back(&found->first);
  return found->second;
}

Source source_of(uint32_t source) {
  std::lock_guard lock(mutex);
  if (source == 0 || source >= places().size()) return {};
  const auto& [file, line, function] = *places()[source];
  return {file, line, function};
}

std::string source_text(uint32_t source) {
  const auto [file, line, function] = source_of(source);
  if (file.empty()) return "";
  return base::concat(" at ", file, ":", line, " in ", function);
}

}  // namespace acc::record
