#include "lazy/record/source.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/base/check.h"

namespace acc::record {
namespace {

// Never destroyed: threads may still record while the process ends.
std::mutex mutex;
std::map<Source, uint32_t>& numbers() {
  static auto& map = *new std::map<Source, uint32_t>;
  return map;
}
std::vector<const Source*>& places() {
  static auto& list = *new std::vector<const Source*>{nullptr};
  return list;
}

}  // namespace

uint32_t intern_source(Source source) {
  std::lock_guard lock(mutex);
  const auto [found, added] =
      numbers().try_emplace(std::move(source), static_cast<uint32_t>(places().size()));
  if (added) places().push_back(&found->first);
  return found->second;
}

Source source_of(uint32_t source) {
  std::lock_guard lock(mutex);
  if (source == 0 || source >= places().size()) return {};
  return *places()[source];
}

std::string source_text(uint32_t source) {
  const Source place = source_of(source);
  if (place.file.empty()) return place.node.empty() ? "" : " at the backward of " + place.node;
  const std::string text =
      base::concat(" at ", place.file, ":", place.line, " in ", place.function);
  return place.node.empty() ? text : text + ", " + place.node;
}

std::string short_source_text(uint32_t source) {
  const Source place = source_of(source);
  if (place.file.empty()) return place.node.empty() ? "" : "backward of " + place.node;
  const std::string file = place.file.substr(place.file.rfind('/') + 1);
  std::string text = base::concat(file, ":", place.line, " in ", place.function);
  if (!place.module.empty()) text.append(" [").append(place.module).append("]");
  if (!place.node.empty()) text.append(", ").append(place.node);
  return text;
}

}  // namespace acc::record
