#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "distributed/collectives.h"

namespace c10d {
class Store;
}

// What goes from one rank to another, and what that one has room for: each of the two knows its
// own. Where something is new to it a rank shows that in the group's store, and compares it with
// what the other has shown: of two to whom it is new the later one sees both.
namespace acc::distributed {

// Says what the program calls a rank.
using NameOf = std::function<std::string(int)>;

// The newest few of what a rank shows of one kind, by number.
class Lines {
 public:
  void add(uint64_t number, std::string line);
  void remove(uint64_t number) { lines_.erase(number); }
  const std::map<uint64_t, std::string>& all() const { return lines_; }
  std::string text() const;
  static Lines read(const std::string& text);

 private:
  std::map<uint64_t, std::string> lines_;
};

// Elements for each rank, and then from each, in an all_to_all; empty for other collectives.
std::vector<int64_t> parts_of(Collective collective, const std::vector<at::Tensor>& outputs,
                              const std::vector<at::Tensor>& inputs, at::IntArrayRef options,
                              int size);

// The parts of collectives by their numbers in the ledger.
class Parts {
 public:
  void add(uint64_t sequence, const std::vector<int64_t>& parts);
  void remove(uint64_t sequence);
  struct Difference {
    uint64_t sequence;
    std::string text;
  };
  // Shows those of this rank. Returns the first that differs from another's; none: no text.
  Difference compare(c10d::Store& store, int rank, const NameOf& name);

 private:
  std::mutex mutex_;
  std::vector<Lines> lines_;  // for each rank, what it gets and what it has to give
};

// Sends and receives. Two ranks count those between them with a tag alike, unless one of them
// receives from anybody: from there on these are not compared.
class Messages {
 public:
  struct Message {
    bool sends;  // rather than receives
    int peer;    // negative: anybody
    int tag;
    std::string what;  // "4 Float"
  };
  // The number of the next one, if it is the first like this: it is to be compared before it
  // begins.
  std::optional<uint64_t> number_if_new(const Message& message);
  // Shows it. Returns how it differs from the other rank's; empty where it does not.
  std::string compare(c10d::Store& store, int rank, const Message& message, uint64_t number,
                      const NameOf& name);
  // It is under way.
  void count(const Message& message);

 private:
  using Way = std::tuple<bool, int, int>;  // sends, peer, tag
  static Way way_of(const Message& message) { return {message.sends, message.peer, message.tag}; }

  std::mutex mutex_;
  std::map<Way, uint64_t> counts_;
  std::map<Way, Lines> lines_;
  std::set<std::pair<Way, std::string>> met_;
  std::set<int> from_anybody_;  // tags
};

}  // namespace acc::distributed
