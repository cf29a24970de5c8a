#include "distributed/tags.h"

#include <chrono>
#include <string>
#include <vector>

// What the header of ProcessGroupGloo names of Gloo, whose own headers are not in torch's wheels
// (in their place are empty ones, from cmake/module.cmake). Nothing of it is made or called here.
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
namespace transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};
}  // namespace transport
namespace rendezvous {
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous
}  // namespace gloo

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace acc::distributed {
namespace {

using c10d::ProcessGroupGloo;

// The counter is for classes that are made of it.
struct Counting : ProcessGroupGloo {
  static uint32_t& counter(ProcessGroupGloo& group) {
    return group.*(&Counting::collectiveCounter_);
  }
};

// Of a tag: calls that are under way at the same time have other numbers whatever their histories
// are, and ranks that differ take each other for alike once in 2^18 times. It stays clear of the
// sign: monitored_barrier sends with it as an int.
constexpr int kNumberBits = 12;
constexpr int kHistoryBits = 18;

}  // namespace

void tag_by_history(c10d::Backend& transport, uint64_t history) {
  auto* const group = dynamic_cast<ProcessGroupGloo*>(&transport);
  if (group == nullptr) return;
  uint32_t& counter = Counting::counter(*group);
  const auto high = static_cast<uint32_t>(history & ((uint64_t{1} << kHistoryBits) - 1));
  counter = (high << kNumberBits) | (counter & ((uint32_t{1} << kNumberBits) - 1));
}

}  // namespace acc::distributed
