#include "lazy/exec/refusals.h"

#include <cstring>
#include <mutex>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"

namespace acc::exec {
namespace {

std::mutex refusals_mutex;
bool refused_late = false;  // in the capture under way
std::string& refused_names() {
  static auto& names = *new std::string;
  return names;
}

bool refused(std::string_view name) {
  const std::string all = base::concat(",", refused_names(), ",");
  return all.find(base::concat(",", name, ",")) != std::string::npos;
}

}  // namespace

void refuse_captures(const std::string& names) {
  ACC_CHECK(names.empty() || runtime::on_host(),
            "[torch.acc] a GPU refuses what it cannot capture by itself, and this process uses "
            "one. Set ACC_EXECUTOR=host.");
  const std::lock_guard lock(refusals_mutex);
  refused_names() = names;
}

bool like_a_gpu() {
  const std::lock_guard lock(refusals_mutex);
  return !refused_names().empty();
}

void refuse(std::string_view name) {
  const std::lock_guard lock(refusals_mutex);
  ACC_CHECK(!refused_late,
            "injected: operation failed due to a previous error during capture: ", name);
  ACC_CHECK(!refused(name), "injected: operation not permitted when stream is capturing: ", name);
  refused_late = refused(base::concat("late ", name));
}

void refuse_begin(size_t begin) {
  {
    const std::lock_guard lock(refusals_mutex);
    refused_late = false;
  }
  refuse("begin");
  if (begin > 0) refuse("begin later");
}

void check_refused() {
  const std::lock_guard lock(refusals_mutex);
  ACC_CHECK(!refused_late, "injected: the operator made the capture invalid");
}

Contents::Contents(Blocks blocks) : blocks_(std::move(blocks)) {
  for (const auto& [data, size] : blocks_) {
    bytes_.emplace_back(static_cast<const char*>(data), size);
  }
}

void Contents::restore() const {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (!bytes_[i].empty()) std::memcpy(blocks_[i].first, bytes_[i].data(), bytes_[i].size());
  }
}

}  // namespace acc::exec
