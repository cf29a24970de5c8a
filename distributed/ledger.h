#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/hash.h"
#include "distributed/collectives.h"

namespace c10d {
class Store;
}

// What a group's ranks have done together, rank by rank. Ranks may record different steps, but not
// different collectives: those that do wait for ever, or take each other's bytes. So each rank
// keeps a hash of its collectives so far, a thread beside the program shows it to the others
// through the group's store, and compares. Nobody waits for that.
namespace acc::distributed {

class Ledger {
 public:
  // `store`: of the group alone; none where there is one rank.
  Ledger(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // A collective was recorded, with its options (see record). Returns its number; 0 where nobody
  // counts them.
  uint64_t note(Collective collective, const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs, at::IntArrayRef options);
  // Something else that all ranks do together.
  uint64_t note(const char* what);

  // A collective is about to begin; one that was not noted is, now: a captured step is recorded
  // once and runs many times.
  uint64_t begin(Collective collective, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs, at::IntArrayRef options);

  // The next of what was noted is about to happen; returns its number. Calls that this rank
  // makes for the first time are shown to the others now, and compared with those of its neighbours
  // as far as these have shown theirs: Gloo ends a process that gets more bytes than it wants.
  // Throws where they differ.
  uint64_t begin();

  // Of the thread beside the program, ten times per second: shows, and looks.
  void tick();

  // Whether this rank has recorded a collective that it has not begun.
  bool pending();
  // Whether that of this number has. Never where nobody counts them.
  bool has_begun(uint64_t sequence);

  // Whether all ranks have recorded the next one that is to begin: whoever begins it now waits for
  // their devices, and not for their programs. May ask the store; where it is lost, it is so.
  bool everybody_has_come();

  // Why the group is of no more use; empty while it is.
  std::string failure();

  // The collective of that number has failed with `error`: says what is known of the other ranks,
  // which hear of it. May take a few seconds, until they have answered. 0: it is none of all ranks.
  std::string explain(uint64_t sequence, const std::string& error);

  // This rank has failed otherwise, and will not do what others wait for.
  void tell(const std::string& why);

 private:
  struct Entry {
    uint64_t sequence;
    uint64_t hash;  // of this and all before
    std::string text;
  };
  // What a rank has shown.
  struct Shown {
    uint64_t newest = 0;
    std::vector<uint64_t> hashes;  // of the newest entries, the last first
    std::string text;              // of the newest
  };

  std::string key(const char* what, int rank) const;
  void show();
  std::optional<Shown> look(int rank);
  std::optional<uint64_t> first_difference(const Shown& other);
  void compare_with_neighbours();
  std::string described(Collective collective, const std::vector<at::Tensor>& outputs,
                        const std::vector<at::Tensor>& inputs, at::IntArrayRef options,
                        base::Hasher* hasher) const;
  uint64_t enter(base::Hasher hasher, std::string text);
  void answer();
  void fail(const std::string& text);
  std::string text_of(uint64_t sequence);
  std::string others_at(uint64_t sequence);

  static constexpr size_t kKept = 1024;
  static constexpr size_t kShown = 64;
  static constexpr size_t kMet = 4096;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  // Of the watching thread:
  uint64_t shown_ = 0;
  uint64_t compared_ = 0;
  uint64_t last_ = 0;  // recorded, at the last tick
  int ticks_ = 0;
  bool answered_ = false;
  std::mutex looking_;          // one thread at a time talks to the store
  std::vector<uint64_t> come_;  // per rank, the newest that it has shown

  std::mutex mutex_;  // guards the rest
  std::deque<Entry> entries_;
  uint64_t sequence_ = 0;  // recorded
  uint64_t begun_ = 0;
  uint64_t hash_ = 0;
  std::string failure_;
  std::unordered_set<uint64_t> met_;  // calls by kind, type, size and options
  bool new_ = false;                  // one was met since the last comparison before a begin
};

}  // namespace acc::distributed
