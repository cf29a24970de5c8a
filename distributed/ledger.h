#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/hash.h"
#include "distributed/collectives.h"
#include "distributed/missed_kernels.h"
#include "distributed/sizes.h"

namespace c10d {
class Store;
}

// What a group's ranks have done together, rank by rank. Ranks may record different steps, but not
// different collectives: those that do wait for ever, or take each other's bytes. So each rank
// keeps a hash of its collectives so far, a thread beside the program shows it to the others
// through the group's store, and compares. Nobody waits for that.
namespace acc::distributed {

// Within which all ranks of this process's groups hear what one of them has failed with: who waits
// for another's sign looks twice, and tells the others.
std::chrono::milliseconds time_to_hear();

class Ledger : public std::enable_shared_from_this<Ledger> {
 public:
  // `store`: of the ledger alone, as its connection is; none where there is one rank. `names`: what
  // the program calls the ranks of the group, as far as they are not 0, 1, 2. `timeout`: how long
  // to wait for ranks that have to skip what this one has skipped.
  Ledger(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::vector<uint64_t> names,
         std::chrono::milliseconds timeout);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Starts the thread beside the program, which ends with the ledger. It alone talks to the store,
  // which may never answer: the others ask it, and go on where it is silent.
  void start();

  // A collective is about to be recorded, with its options (see record), and then `recorded` or
  // `take_back` is called. Returns its number; 0 where nobody counts them.
  uint64_t note(Collective collective, const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs, at::IntArrayRef options);
  // Something else that all ranks do together, and that begins now.
  uint64_t note(const char* what);
  // Nobody is shown it before.
  void recorded(uint64_t sequence);
  // It was not recorded, as if it had not been called, unless it has begun all the same.
  void take_back(uint64_t sequence);

  // A collective is about to begin; one that was not noted is, now: a captured step is recorded
  // once and runs many times.
  uint64_t begin(Collective collective, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs, at::IntArrayRef options);

  // The next of what was noted is about to happen; returns its number. Calls that this rank makes
  // for the first time, or behind another one than before, are shown to the others now, and
  // compared with those of its neighbours, and parts with those of all, as far as these have shown
  // theirs: so most programs that go wrong hear it before they wait. Throws where they differ, and
  // where the group is of no more use. Where this rank has skipped some, waits until all others
  // have skipped them, too.
  uint64_t begin();

  // A send or a receive is about to begin, and then `count` is called. Of those that are new to
  // this rank size and type are compared, as far as the other rank has shown its own. Throws where
  // they differ.
  void begin(const Messages::Message& message);
  void count(const Messages::Message& message) { messages_.count(message); }

  // The program has left the group: the thread beside it ends as soon as the others have heard of
  // what failed, and asks the store for nothing more.
  void end();

  // Whether anybody counts them: there is no need where there is one rank.
  bool counts() const { return store_ != nullptr; }
  // How many have begun, or were skipped.
  uint64_t begun();
  // Whether this rank has noted a collective that it has not begun, and so long ago.
  bool pending_for(std::chrono::milliseconds time);
  // Whether that of this number has. Never where nobody counts them.
  bool has_begun(uint64_t sequence);

  // Whether all ranks have recorded the next one that is to begin: whoever begins it now waits for
  // their devices, and not for their programs. Asks the store; where it is lost, it is so.
  bool everybody_has_come();

  // "rank 5", as torch.distributed.get_rank() says there: of a rank of this group.
  std::string name(int rank) const;

  // What the collective of that number is, with its line.
  std::string text_of(uint64_t sequence);

  // A hash of the one of that number, which has begun last, and of all before it: the same on all
  // ranks that have done the same.
  uint64_t history(uint64_t sequence);

  // Why the group is of no more use; empty while it is.
  std::string failure();

  // The collective of that number has failed with `error`: says what is known of the other ranks,
  // and which of them give no sign of life; they hear of it. May take a few seconds, until they
  // have answered, and longer in groups of many. 0: it is none of all ranks.
  std::string explain(uint64_t sequence, const std::string& error);

  // The group is about to end: throws if it has failed, be it for a kernel that a rank has missed
  // just now.
  void last_look();

  // A collective of this rank has failed otherwise, and others wait for it.
  void tell(const std::string& why);

  // The group is of no more use to this rank, and the others hear of it.
  void give_up();

  // A step of this rank has failed, and with it the next `count` collectives, which it will never
  // begin. Where all ranks skip as many, they go on behind them; else the group has failed.
  void skip(uint64_t count, const std::string& why);

 private:
  struct Entry {
    uint64_t sequence;
    uint64_t kind;  // hash of the call, or kSkipped
    uint64_t hash;  // of this and all before
    uint64_t met;   // of this, its parts and the kind before
    std::string text;
    std::chrono::steady_clock::time_point noted = std::chrono::steady_clock::now();
  };
  // What a rank has shown.
  struct Shown {
    uint64_t newest = 0;
    uint64_t skips = 0;            // how often it has skipped some
    std::vector<uint64_t> hashes;  // of the newest entries, the last first
    std::string text;              // of the newest
  };
  // Collectives that this rank has skipped.
  struct Skip {
    uint64_t first;
    uint64_t last;
    std::string why;
  };
  // Where two ranks do different things. The one that has seen it says what.
  struct Difference {
    uint64_t sequence;
    int seen_by;
    int other;
  };

  template <class Talk>
  auto ask(Talk talk) -> decltype(talk());
  bool has_ended();
  bool is_needed();
  void attend();
  void tick();
  void hear_of_kernels();
  std::string key(const char* what, uint64_t number) const;
  std::optional<std::string> get(const std::string& key);  // nothing where there is none
  void show();
  std::optional<Shown> look(int rank);
  static Shown read(const std::string& text);
  bool have_recorded(const std::vector<int>& ranks, uint64_t count);
  std::optional<uint64_t> first_difference(const Shown& other);
  void differs(uint64_t sequence, int other);
  bool compare_with_neighbours();
  void compare_parts();
  void throw_failure();
  uint64_t enter(uint64_t kind, std::string text, const std::vector<int64_t>& parts = {});
  uint64_t last_kind() const { return entries_.empty() ? 0 : entries_.back().kind; }
  void answer();
  void wait_for_verdict();
  void hear();
  void fail(const std::string& text);
  void mark_failed(const std::string& text);
  void publish();
  std::string unlike(const std::string& skip, uint64_t first);
  void agree_on_skips();
  void wait_for_agreement();
  std::optional<Difference> difference();
  std::string others_at(uint64_t sequence);
  std::string silent_ranks();

  static constexpr size_t kKept = 1024;
  static constexpr size_t kShown = 64;  // and what has not begun
  static constexpr uint64_t kSkipped = 1;
  static constexpr size_t kMet = 4096;
  static constexpr size_t kMetParts = 64;  // of all_to_all

  const c10::intrusive_ptr<c10d::Store> store_;  // of its own; null: nothing to compare
  const int rank_;
  const int size_;
  const std::vector<uint64_t> names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  // Of the thread beside the program:
  uint64_t shown_ = 0;
  uint64_t compared_ = 0;
  uint64_t last_ = 0;  // recorded, at the last tick
  int ticks_ = 0;
  bool answered_ = false;
  int times_asked_ = 0;
  std::chrono::steady_clock::time_point next_tick_;
  std::chrono::steady_clock::time_point next_sign_;
  MissedKernels kernels_;
  bool skip_is_told_ = false;   // the first that is not agreed on
  std::vector<uint64_t> come_;  // per rank, the newest that it has shown

  Parts parts_;
  Messages messages_;
  const NameOf name_of_ = [this](int rank) { return name(rank); };

  std::mutex mutex_;  // guards the rest
  std::condition_variable asked_;
  std::deque<std::function<void()>> questions_;
  bool silent_ = false;  // a question was not answered in time
  bool ended_ = false;
  std::deque<Entry> entries_;
  uint64_t sequence_ = 0;  // noted
  uint64_t recorded_ = 0;
  uint64_t begun_ = 0;  // or skipped
  std::chrono::steady_clock::time_point begun_at_;
  bool hidden_ = false;  // some that have begun were not shown
  uint64_t hash_ = 0;
  std::string failure_;
  bool untold_ = false;  // the others have not heard of it
  std::optional<Difference> difference_;
  std::vector<Skip> skips_;
  size_t agreed_ = 0;                 // of these, how many all ranks have skipped
  std::unordered_set<uint64_t> met_;  // as in entries, of those that were met
  size_t new_parts_ = 0;
  bool new_ = false;  // one was met since the last comparison before a begin
};

}  // namespace acc::distributed
