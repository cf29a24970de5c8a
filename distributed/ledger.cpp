#include "distributed/ledger.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/gil.h"
#include "distributed/described.h"
#include "distributed/signs.h"
#include "distributed/texts.h"
#include "lazy/record/source.h"
#include "lazy/record/watch.h"

namespace acc::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// From one tick of the thread beside the program to the next, and ticks from one look at the others
// to the next.
constexpr auto kTick = milliseconds(100);
constexpr int kLook = 10;
constexpr int kOften = 128;  // ranks
// What a rank has begun is shown when it begins nothing else for so long: it may wait for others,
// who ask whether it has come. The store has so much time for each rank, or more.
constexpr auto kSoon = milliseconds(2);
constexpr auto kShare = std::chrono::microseconds(500);

// Ranks of this process's groups, all of which may speak to one store.
std::atomic<int> partners = 0;

// The store answers all ranks: the more they are, the more seldom each speaks to it.
int seldom() { return 1 + partners.load() / kOften; }
// From one look at the others to the next, and from one sign of life to the next.
milliseconds look_time() { return kTick * kLook * seldom(); }
// How much later than that a living rank may give one, where many processes share the processors.
constexpr auto kLate = std::chrono::seconds(1);

Clock::duration quiet_time() { return std::max<Clock::duration>(partners.load() * kShare, kSoon); }

// How long a question may take before the store counts as silent.
constexpr auto kPatience = std::chrono::seconds(3);
// How often the others are asked what they did where they differ, and how long until it is told.
constexpr int kAsked = 40;
constexpr auto kVerdict = std::chrono::seconds(6);
// How often a thread that waits looks whether it is over, or the user has asked to stop.
constexpr auto kPoll = milliseconds(20);

// Counts what the program waits for beside the exchanges themselves.
void count_wait(const char* why) { base::count_keyed("group_waits", why); }

constexpr const char* kFailed = "failed";    // the reason, for all
constexpr const char* kDiffers = "differs";  // a Difference

// Of a call. Where it was made may differ though it is the same.
std::string without_place(const std::string& text) { return text.substr(0, text.find(" at ")); }

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// The hash of a call of that kind and of all before it.
uint64_t chained(uint64_t before, uint64_t kind) {
  base::Hasher hasher;
  hasher.add(before);
  hasher.add(kind);
  return hasher.finish().lo;
}

}  // namespace

milliseconds time_to_hear() { return 2 * look_time() + std::chrono::seconds(3); }

Ledger::Ledger(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
               std::vector<uint64_t> names, std::chrono::milliseconds timeout)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      names_(std::move(names)),
      timeout_(timeout) {
  if (counts()) partners += size_;
}

Ledger::~Ledger() {
  if (counts()) partners -= size_;
}

// ---- the thread beside the program -------------------------------------------------------------

void Ledger::start() {
  if (store_ == nullptr) return;
  std::thread([of = weak_from_this()] {
    for (;;) {
      const auto ledger = of.lock();
      if (ledger == nullptr || !ledger->is_needed()) return;
      ledger->attend();
    }
  }).detach();
}

void Ledger::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

bool Ledger::has_ended() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool Ledger::is_needed() {
  const std::lock_guard lock(mutex_);
  return !ended_ || untold_ || !questions_.empty();
}

// Has `talk` called by that thread, and returns what it returns; it may be called after this one
// has given up. Throws what it throws, and where the store is silent.
template <class Talk>
auto Ledger::ask(Talk talk) -> decltype(talk()) {
  using Answer = decltype(talk());
  const auto task = std::make_shared<std::packaged_task<Answer()>>(std::move(talk));
  std::future<Answer> answer = task->get_future();
  const auto silent = [] { return base::Error("it has not answered for some seconds"); };
  {
    const std::lock_guard lock(mutex_);
    if (ended_) throw base::Error("the group was destroyed");
    if (silent_) throw silent();
    questions_.emplace_back([task] { (*task)(); });
  }
  asked_.notify_one();
  if (answer.wait_for(kPatience) == std::future_status::ready) return answer.get();
  const std::lock_guard lock(mutex_);
  silent_ = true;
  throw silent();
}

// Answers a question, if there is one before the next tick.
void Ledger::attend() {
  std::function<void()> question;
  bool waits = false;
  {
    std::unique_lock lock(mutex_);
    silent_ = false;
    const bool hidden = hidden_;
    const Clock::time_point end =
        hidden ? std::min(next_tick_, begun_at_ + quiet_time()) : next_tick_;
    asked_.wait_until(lock, end, [&] { return !questions_.empty() || hidden_ != hidden; });
    if (!questions_.empty()) {
      question = std::move(questions_.front());
      questions_.pop_front();
    }
    waits = hidden_ && Clock::now() >= begun_at_ + quiet_time();
  }
  if (question) question();
  try {
    if (waits) show();
    if (Clock::now() < next_tick_) return;
    next_tick_ = Clock::now() + kTick;
    tick();
  } catch (const std::exception&) {
    runtime::warn_once(base::concat(
        "[torch.distributed] the store of a process group does not answer, so ranks that do "
        "different things are not told: ",
        runtime::text_of(std::current_exception())));
  }
}

void Ledger::tick() {
  const uint64_t recorded = [&] {
    const std::lock_guard lock(mutex_);
    return recorded_;
  }();
  const int share = seldom();
  if (++ticks_ % share != 0) return;
  if (Clock::now() >= next_sign_) {
    next_sign_ = Clock::now() + look_time();
    give_sign(*store_, rank_);
  }
  publish();
  kernels_.tell(*store_, name(rank_));
  // Who records nothing new may be what others wait for.
  if (recorded == std::exchange(last_, recorded)) show();
  agree_on_skips();
  if (ticks_ % (kLook * share) != 0 && !difference().has_value()) return;
  show();
  hear();
  if (!failure().empty()) return;
  if (compared_ != shown_ && compare_with_neighbours()) compared_ = shown_;
  answer();
  hear_of_kernels();
}

void Ledger::hear_of_kernels() {
  if (const std::string why = kernels_.hear(*store_, name(rank_)); !why.empty()) fail(why);
}

std::string Ledger::key(const char* what, uint64_t number) const {
  return base::concat(what, "/", number);
}

std::optional<std::string> Ledger::get(const std::string& key) {
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

void Ledger::show() {
  std::string newest;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    hidden_ = false;
    if (recorded_ == shown_) return;
    shown_ = recorded_;
    newest = hex(recorded_);
    text = newest + " " + hex(skips_.size());
    size_t at = entries_.size() - (sequence_ - recorded_);
    const std::string& call = entries_[at - 1].text;
    // Others may come to what has not begun much later, and see by it that they do something else.
    const size_t count = kShown + (recorded_ - begun_);
    for (size_t i = 0; i < count && at > 0; ++i) text += " " + hex(entries_[--at].hash);
    text += "\n" + call;
  }
  const auto rank = static_cast<uint64_t>(rank_);
  store_->multiSet({key("shown", rank), key("newest", rank)}, {bytes(text), bytes(newest)});
}

std::optional<Ledger::Shown> Ledger::look(int rank) {
  const auto text = get(key("shown", static_cast<uint64_t>(rank)));
  if (!text.has_value()) return std::nullopt;
  return read(*text);
}

Ledger::Shown Ledger::read(const std::string& text) {
  std::vector<uint64_t> hashes = numbers(first_line(text));
  const uint64_t newest = hashes.at(0);
  const uint64_t skips = hashes.at(1);
  hashes.erase(hashes.begin(), hashes.begin() + 2);
  return {newest, skips, std::move(hashes), behind_first_line(text)};
}

// Whether all of `ranks` have shown that they have recorded so many. As many requests for many
// ranks as for one.
bool Ledger::have_recorded(const std::vector<int>& ranks, uint64_t count) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(key("newest", static_cast<uint64_t>(rank)));
  if (keys.empty()) return true;
  if (!store_->check(keys)) return false;
  const std::vector<std::vector<uint8_t>> found = store_->multiGet(keys);
  bool all = true;
  for (size_t i = 0; i < ranks.size(); ++i) {
    uint64_t& newest = come_[static_cast<size_t>(ranks[i])];
    newest = numbers({reinterpret_cast<const char*>(found[i].data()), found[i].size()}).at(0);
    all = all && newest >= count;
  }
  return all;
}

// The first collective, of those that both still know, that is another one there. What only one of
// two ranks has skipped so far is not compared: see skip.
std::optional<uint64_t> Ledger::first_difference(const Shown& other) {
  const std::lock_guard lock(mutex_);
  if (other.skips != skips_.size()) return std::nullopt;
  for (const Entry& entry : entries_) {
    if (entry.sequence > std::min(other.newest, recorded_)) break;
    const uint64_t back = other.newest - entry.sequence;
    if (back < other.hashes.size() && other.hashes[back] != entry.hash) return entry.sequence;
  }
  return std::nullopt;
}

void Ledger::differs(uint64_t sequence, int other) {
  const auto ranks = {static_cast<uint64_t>(rank_), static_cast<uint64_t>(other)};
  std::string text = hex(sequence);
  for (const uint64_t rank : ranks) text += " " + hex(rank);
  store_->compareSet(kDiffers, "", text);
}

// What differs anywhere differs between two neighbours, and the later of the two to show it sees
// it. What one that is far ahead shows may begin behind all that the other has done: then the first
// sees it, when the other comes. Returns whether both neighbours have come as far as this rank.
bool Ledger::compare_with_neighbours() {
  bool all = true;
  for (const int by : {1, size_ - 1}) {
    const int other = (rank_ + by) % size_;
    const auto shown = look(other);
    all = all && shown.has_value() && shown->newest >= shown_;
    if (!shown.has_value()) continue;
    if (const auto sequence = first_difference(*shown)) differs(*sequence, other);
  }
  return all;
}

void Ledger::compare_parts() {
  const auto [sequence, text] = parts_.compare(*store_, rank_, name_of_);
  if (text.empty()) return;
  fail(base::concat("ranks exchange different sizes: in collective number ", sequence,
                    " of the group, ", text_of(sequence), ", ", text, "."));
}

// Where ranks differ: the two, and rank 0, tell what they did there, and the one that has seen it
// tells all, once it has heard the others or has asked them often enough.
void Ledger::answer() {
  if (!difference().has_value()) {
    const auto text = get(kDiffers);
    if (!text.has_value()) return;
    const std::vector<uint64_t> found = numbers(*text);
    const std::lock_guard lock(mutex_);
    difference_ = {found[0], static_cast<int>(found[1]), static_cast<int>(found[2])};
  }
  const auto [sequence, seen_by, other] = *difference();
  const bool asked = rank_ == 0 || rank_ == seen_by || rank_ == other;
  if (asked && !std::exchange(answered_, true)) {
    store_->set(key("text", static_cast<uint64_t>(rank_)), text_of(sequence));
  }
  if (rank_ != seen_by || !failure().empty()) return;
  std::map<int, std::string> texts;
  for (const int rank : {0, seen_by, other}) {
    if (const auto text = get(key("text", static_cast<uint64_t>(rank)))) texts[rank] = *text;
  }
  for (const int rank : {0, seen_by, other}) {
    if (!texts[rank].empty()) continue;
    if (++times_asked_ < kAsked) return;
    // A rank that has ended may have shown it before.
    const auto shown = look(rank);
    texts[rank] = shown && shown->newest == sequence ? shown->text : "(no answer)";
  }
  // Of two that differ one is not as rank 0 is.
  const bool this_one = seen_by != 0 && without_place(texts[seen_by]) != without_place(texts[0]);
  const int rank = this_one || other == 0 ? seen_by : other;
  fail(base::concat("ranks do different things: collective number ", sequence, " of the group is ",
                    texts[0], " on ", name(0), ", and ", texts[rank], " on ", name(rank),
                    ". All ranks have to call the same collectives in the same order."));
}

// What others have told to all.
void Ledger::hear() {
  if (const auto why = get(kFailed)) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = *why;
    return;
  }
  uint64_t begun = 0;
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    begun = begun_;
    round = skips_.size() + 1;
  }
  const auto skip = get(key("skip", round));
  if (!skip.has_value()) return;
  const uint64_t first = numbers(first_line(*skip))[0];
  if (begun >= first) fail(unlike(*skip, first));
}

void Ledger::fail(const std::string& text) {
  mark_failed(text);
  publish();
}

// Known here at once, and to the others with `publish`: at the next tick at the latest, or when the
// store answers again.
void Ledger::mark_failed(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = text;
  untold_ = true;
}

void Ledger::publish() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (!untold_) return;
    text = failure_;
  }
  store_->compareSet(kFailed, "", text);
  const std::lock_guard lock(mutex_);
  untold_ = false;
}

// What other ranks, which know nothing of it, are told of a skip.
std::string Ledger::unlike(const std::string& skip, uint64_t first) {
  return base::concat(behind_first_line(skip), " (so it did not begin collective number ", first,
                      " of the group, ", text_of(first), ", as other ranks did)");
}

// The ranks tell of their skips in the order in which they make them, and all of them have to tell
// the same.
void Ledger::agree_on_skips() {
  for (;;) {
    Skip skip;
    uint64_t round = 0;
    {
      const std::lock_guard lock(mutex_);
      if (agreed_ == skips_.size()) return;
      skip = skips_[agreed_];
      round = agreed_ + 1;
    }
    if (!skip_is_told_) {
      const std::string range = hex(skip.first) + " " + hex(skip.last);
      const std::string told = store_->compareSet(
          key("skip", round), "", base::concat(range, "\n", name(rank_), " failed: ", skip.why));
      if (first_line(told) != range) return fail(unlike(told, numbers(first_line(told))[0]));
      store_->add(key("skipped", round), 1);
      skip_is_told_ = true;
    }
    if (store_->add(key("skipped", round), 0) < size_) return;
    skip_is_told_ = false;
    const std::lock_guard lock(mutex_);
    ++agreed_;
  }
}

// What the other ranks that have not come so far are known to have recorded.
std::string Ledger::others_at(uint64_t sequence) {
  std::string text;
  const Texts all = of_ranks(*store_, "shown", size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const auto& told = all[static_cast<size_t>(rank)];
    const char* comma = text.empty() ? "" : ", ";
    if (!told.has_value()) {
      text += base::concat(comma, name(rank), " has not told of any");
      continue;
    }
    const Shown shown = read(*told);
    if (const auto different = first_difference(shown)) {
      differs(*different, rank);
    } else if (shown.newest < sequence) {
      text += base::concat(comma, name(rank), " has told of ", shown.newest);
      if (const auto why = get(key("error", static_cast<uint64_t>(rank)))) {
        text += base::concat(" (", name(rank), " failed: ", *why, ")");
      }
    }
  }
  return text;
}

// ---- the program -------------------------------------------------------------------------------

uint64_t Ledger::note(Collective collective, const std::vector<at::Tensor>& outputs,
                      const std::vector<at::Tensor>& inputs, at::IntArrayRef options) {
  if (store_ == nullptr) return 0;
  const auto [kind, text] = described(collective, outputs, inputs, options);
  const auto parts = parts_of(collective, outputs, inputs, options, size_);
  const std::string place = record::source_text(record::source_here());
  const std::lock_guard lock(mutex_);
  return enter(kind, text + place, parts);
}

uint64_t Ledger::note(const char* what) {
  if (store_ == nullptr) return 0;
  base::Hasher hasher;
  hasher.add(std::string_view(what));
  const std::string place = record::source_text(record::source_here());
  const std::lock_guard lock(mutex_);
  return enter(hasher.finish().lo, what + place);
}

uint64_t Ledger::begin(Collective collective, const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, at::IntArrayRef options) {
  if (store_ != nullptr && !pending_for(milliseconds(0))) {
    auto [kind, text] = described(collective, outputs, inputs, options);
    const auto parts = parts_of(collective, outputs, inputs, options, size_);
    const std::lock_guard lock(mutex_);
    enter(kind, std::move(text), parts);
  }
  return begin();
}

uint64_t Ledger::begin() {
  if (store_ == nullptr) return 0;
  wait_for_agreement();
  uint64_t sequence = 0;
  bool compare = false;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    sequence = ++begun_;
    recorded_ = std::max(recorded_, begun_);
    compare = std::exchange(new_, false);
    begun_at_ = Clock::now();
    wake = !std::exchange(hidden_, true);
  }
  if (wake) asked_.notify_one();
  if (compare) {
    count_wait("a call is new");
    try {
      ask([this] {
        show();
        compare_with_neighbours();
        compare_parts();
        answer();
      });
      wait_for_verdict();
    } catch (const std::exception&) {
      // the store is lost, which the thread beside tells
    }
  }
  throw_failure();
  return sequence;
}

void Ledger::begin(const Messages::Message& message) {
  if (store_ == nullptr) return;
  const std::optional<uint64_t> number = messages_.number_if_new(message);
  if (!number.has_value()) return;
  count_wait("a message is new");
  const std::string place = record::source_text(record::source_here());
  try {
    ask([this, message, number, place] {
      const std::string why = messages_.compare(*store_, rank_, message, *number, name_of_);
      if (!why.empty()) fail(base::concat("ranks exchange different sizes: ", why, place, "."));
    });
  } catch (const std::exception&) {
    // as above
  }
  throw_failure();
}

void Ledger::throw_failure() {
  if (const std::string why = failure(); !why.empty()) {
    C10_THROW_ERROR(DistBackendError, "[torch.distributed] " + why);
  }
}

// With the mutex.
uint64_t Ledger::enter(uint64_t kind, std::string text, const std::vector<int64_t>& parts) {
  // Of a program whose calls, or parts, are always new, only the first are compared before they
  // begin.
  const bool with_parts = !parts.empty() && new_parts_ < kMetParts;
  uint64_t met = chained(last_kind(), kind);
  if (with_parts) {
    for (const int64_t part : parts) met = chained(met, static_cast<uint64_t>(part));
  }
  const bool is_new = met_.size() < kMet && met_.insert(met).second;
  new_ |= is_new;
  if (with_parts && is_new) ++new_parts_;
  hash_ = chained(hash_, kind);
  entries_.push_back({++sequence_, kind, hash_, met, std::move(text)});
  // Those that have not begun, and the last that has, are still asked for.
  while (entries_.size() > kKept && entries_.front().sequence < begun_) entries_.pop_front();
  if (with_parts) parts_.add(sequence_, parts);
  return sequence_;
}

void Ledger::recorded(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  recorded_ = std::max(recorded_, sequence);
}

void Ledger::take_back(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  if (sequence != sequence_ || sequence <= recorded_) return;
  met_.erase(entries_.back().met);  // it has not been compared
  entries_.pop_back();
  parts_.remove(sequence);
  hash_ = entries_.empty() ? 0 : entries_.back().hash;
  --sequence_;
}

bool Ledger::pending_for(milliseconds time) {
  const std::lock_guard lock(mutex_);
  if (begun_ == sequence_) return false;
  const uint64_t kept = std::min<uint64_t>(sequence_ - begun_, entries_.size());
  return Clock::now() - entries_[entries_.size() - kept].noted >= time;
}

uint64_t Ledger::begun() {
  const std::lock_guard lock(mutex_);
  return begun_;
}

bool Ledger::has_begun(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  return store_ != nullptr && begun_ >= sequence;
}

bool Ledger::everybody_has_come() {
  if (store_ == nullptr) return true;
  uint64_t next = 0;
  {
    const std::lock_guard lock(mutex_);
    next = begun_ + 1;
    if (next > recorded_) return false;
  }
  try {
    return ask([this, next] {
      show();
      come_.resize(static_cast<size_t>(size_));
      std::vector<int> late;
      for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_ && come_[static_cast<size_t>(rank)] < next) late.push_back(rank);
      }
      if (late.empty()) return true;
      const int one = late.back();
      late.pop_back();
      // While it has not come the others need not be asked.
      return have_recorded({one}, next) && have_recorded(late, next);
    });
  } catch (const std::exception&) {
    return true;  // the thread beside the program tells of it
  }
}

std::string Ledger::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<Ledger::Difference> Ledger::difference() {
  const std::lock_guard lock(mutex_);
  return difference_;
}

std::string Ledger::name(int rank) const {
  const auto index = static_cast<size_t>(rank);
  return base::concat("rank ", index < names_.size() ? names_[index] : index);
}

std::string Ledger::text_of(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.sequence == sequence) return entry.text;
  }
  return sequence > sequence_ ? "nothing so far" : "something too long ago";
}

uint64_t Ledger::history(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  // A replay in another thread may have begun more than it has noted.
  const uint64_t at = entries_.empty() ? 0 : sequence - entries_.front().sequence;
  return at < entries_.size() ? entries_[at].hash : hash_;
}

// Where ranks differ, what they do is known soon.
void Ledger::wait_for_verdict() {
  const Clock::time_point limit = Clock::now() + kVerdict;
  if (difference().has_value()) count_wait("ranks differ");
  while (difference().has_value() && failure().empty() && Clock::now() < limit) {
    std::this_thread::sleep_for(kPoll);
  }
}

// Which other ranks give no sign of life in the time of two. Called by the program's threads: the
// one beside it goes on with this rank's own. Empty where it is known meanwhile what failed.
std::string Ledger::silent_ranks() {
  const auto signs = [this] {
    return ask([this] {
      hear();
      return signs_of(*store_, size_);
    });
  };
  const Texts before = signs();
  const auto pause = look_time() / 4;
  // By how long this process has waited, not by the clock: where all of them stood still for a
  // while, as on a machine that was suspended, those that live have had no time to give a sign.
  for (auto left = 2 * look_time() + kLate;;) {
    std::this_thread::sleep_for(pause);
    left -= pause;
    const std::string text =
        silent_between(before, signs(), rank_, [this](int rank) { return name(rank); });
    if (text.empty() || !failure().empty() || runtime::interrupted()) return "";
    if (left <= left.zero()) return text;
  }
}

std::string Ledger::explain(uint64_t sequence, const std::string& error) {
  if (store_ == nullptr) return "";
  if (const std::string why = failure(); !why.empty()) return base::concat(" (", why, ")");
  if (has_ended()) return "";
  std::string said;
  if (sequence > 0) {  // else it is between two ranks
    said = base::concat("collective number ", sequence, " of the group, ", text_of(sequence));
  }
  try {
    const std::string others = ask([this, sequence] {
      shown_ = 0;
      show();
      hear();
      std::string text = others_at(sequence);
      answer();
      return text;
    });
    wait_for_verdict();
    const std::string silent = failure().empty() ? silent_ranks() : "";
    if (const std::string why = failure(); !why.empty()) return base::concat(" (", why, ")");
    if (said.empty()) return silent.empty() ? "" : base::concat(" (", silent, ")");
    const char* both = others.empty() || silent.empty() ? "" : ", and ";
    if (!others.empty() || !silent.empty()) {
      said += base::concat(", and ", others, both, silent);
    } else if (size_ == 2) {
      said += base::concat(", with ", name(1 - rank_));
    } else {
      said += base::concat(", to which all ", size_, " ranks have come");
    }
    tell(base::concat(error, " (in ", said, ")"));
    return base::concat(" (in ", said, ")");
  } catch (const std::exception&) {
    if (!said.empty()) said = base::concat("in ", said, ", and ");
    return base::concat(" (", said, "the group's store does not answer, so the process that keeps ",
                        "it, rank 0 or its launcher, may have ended: ",
                        runtime::text_of(std::current_exception()), ")");
  }
}

void Ledger::give_up() {
  mark_failed(base::concat(name(rank_), " failed: it has aborted the group"));
  if (store_ == nullptr) return;
  try {
    ask([this] { publish(); });
  } catch (const std::exception&) {
    // without their store the others see only that this rank is gone
  }
}

void Ledger::last_look() {
  if (store_ == nullptr) return;
  try {
    ask([this] {
      kernels_.tell(*store_, name(rank_));
      hear_of_kernels();
    });
  } catch (const std::exception&) {
    // a store that is lost at the end tells nothing
  }
  if (const std::string why = failure(); !why.empty()) throw base::Error(why);
}

void Ledger::tell(const std::string& why) {
  if (store_ == nullptr) return;
  mark_failed(base::concat(name(rank_), " failed: ", why));
  ask([this] { publish(); });
}

void Ledger::skip(uint64_t count, const std::string& why) {
  if (store_ == nullptr) return;
  if (count > 0) {
    const std::lock_guard lock(mutex_);
    const uint64_t first = begun_ + 1;
    const uint64_t last = begun_ + count;
    skips_.push_back({first, last, why});
    // Those of a captured step were not noted. Another rank may have called the same ones outside
    // of one, so what they were counts nowhere.
    while (sequence_ < last) enter(kSkipped, "one of a captured step");
    begun_ = last;
    for (uint64_t each = first; each <= last; ++each) parts_.remove(each);
    hash_ = 0;
    for (Entry& entry : entries_) {
      if (entry.sequence >= first && entry.sequence <= begun_) entry.kind = kSkipped;
      if (entry.sequence >= first) entry.hash = chained(hash_, entry.kind);
      hash_ = entry.hash;
    }
    recorded_ = std::max(recorded_, begun_);
  }
  ask([this, why] {
    shown_ = 0;  // it is shown anew
    store_->set(key("error", static_cast<uint64_t>(rank_)), why);
    agree_on_skips();
  });
}

void Ledger::wait_for_agreement() {
  const Clock::time_point limit = Clock::now() + timeout_.load();
  for (bool counted = false;; counted = true) {
    {
      const std::lock_guard lock(mutex_);
      if (agreed_ == skips_.size() || !failure_.empty()) return;
    }
    if (!counted) count_wait("a step was skipped");
    if (runtime::interrupted()) {
      C10_THROW_ERROR(DistBackendError,
                      "[torch.distributed] interrupted while waiting for other processes.");
    }
    TORCH_CHECK_WITH(DistBackendError, Clock::now() < limit,
                     "[torch.distributed] a step of this rank has failed, and with it collectives "
                     "that other ranks have not come to, or not told of, within the timeout. Let "
                     "all ranks go on alike behind an error, or end.");
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace acc::distributed
