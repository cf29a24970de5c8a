#include "distributed/ledger.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/errors.h"
#include "lazy/record/source.h"
#include "lazy/record/watch.h"

namespace acc::distributed {
namespace {

// Ticks from one look at the others to the next.
constexpr int kLook = 10;
constexpr int kOften = 128;  // ranks
// How long the others have to say what they did where they differ, and how often that is asked.
constexpr int kAsked = 40;
constexpr auto kPause = std::chrono::milliseconds(100);

constexpr const char* kFailed = "failed";    // the reason, for all
constexpr const char* kDiffers = "differs";  // the sequence number at which ranks differ

// Elements that each rank has in the call, which all of them must agree on; none where they need
// not.
int64_t elements_of(Collective collective, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs) {
  const auto sum = [](const std::vector<at::Tensor>& tensors) {
    int64_t all = 0;
    for (const at::Tensor& tensor : tensors) all += tensor.numel();
    return all;
  };
  switch (collective) {
    case Collective::kGather:
    case Collective::kAllGather:
    case Collective::kAllGatherInto:
      return sum(inputs);
    case Collective::kAllToAll:
    case Collective::kAllToAllSingle:
      return 0;
    default:
      return sum(outputs);
  }
}

// Those that all ranks pass alike. Of a reduction that is what the program asked for, which stands
// last, and not what the transport makes of it.
at::IntArrayRef options_in_common(Collective collective, at::IntArrayRef options) {
  switch (collective) {
    case Collective::kAllToAllSingle:
      return {};
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kReduceScatter:
    case Collective::kReduceScatterInto:
      return options.slice(1);
    default:
      return options;
  }
}

uint64_t number(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

// Beside what the transport keeps there.
c10::intrusive_ptr<c10d::Store> part_of(c10d::Store& store) {
  return c10::make_intrusive<c10d::PrefixStore>("ledger", store.clone());
}

std::string hex(uint64_t value) {
  char text[17];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

}  // namespace

Ledger::Ledger(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(size > 1 && store != nullptr ? part_of(*store) : nullptr), rank_(rank), size_(size) {}

std::string Ledger::described(Collective collective, const std::vector<at::Tensor>& outputs,
                              const std::vector<at::Tensor>& inputs, at::IntArrayRef options,
                              base::Hasher* hasher) const {
  const at::Tensor& some = outputs.empty() ? inputs[0] : outputs[0];
  const int64_t elements = elements_of(collective, outputs, inputs);
  const std::string type = c10::toString(some.scalar_type());
  std::string text = base::concat(name(collective), " of ", elements, " ", type);
  const at::IntArrayRef common = options_in_common(collective, options);
  for (size_t i = 0; i < common.size(); ++i) {
    hasher->add(common[i]);
    text += base::concat(i == 0 ? " (" : ", ", common[i], i + 1 == common.size() ? ")" : "");
  }
  hasher->add(std::string_view(name(collective)));
  hasher->add(std::string_view(type));
  hasher->add(elements);
  return text;
}

uint64_t Ledger::note(Collective collective, const std::vector<at::Tensor>& outputs,
                      const std::vector<at::Tensor>& inputs, at::IntArrayRef options) {
  if (store_ == nullptr) return 0;
  base::Hasher hasher;
  const std::string text = described(collective, outputs, inputs, options, &hasher);
  return enter(hasher, text + record::source_text(record::source_here()));
}

uint64_t Ledger::note(const char* what) {
  if (store_ == nullptr) return 0;
  base::Hasher hasher;
  hasher.add(std::string_view(what));
  return enter(hasher, what + record::source_text(record::source_here()));
}

uint64_t Ledger::begin(Collective collective, const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, at::IntArrayRef options) {
  if (store_ != nullptr && !pending()) {
    base::Hasher hasher;
    std::string text = described(collective, outputs, inputs, options, &hasher);
    enter(hasher, std::move(text));
  }
  return begin();
}

uint64_t Ledger::enter(base::Hasher hasher, std::string text) {
  const std::lock_guard lock(mutex_);
  // Of a program whose calls are always new, only the first are compared before they begin.
  if (met_.size() < kMet) new_ |= met_.insert(hasher.finish().lo).second;
  hasher.add(static_cast<int64_t>(hash_));
  hash_ = hasher.finish().lo;
  entries_.push_back({++sequence_, hash_, std::move(text)});
  if (entries_.size() > kKept) entries_.pop_front();
  return sequence_;
}

std::string Ledger::key(const char* what, int rank) const { return base::concat(what, "/", rank); }

void Ledger::show() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (sequence_ == shown_) return;
    shown_ = sequence_;
    text = hex(sequence_);
    const size_t count = std::min(kShown, entries_.size());
    for (size_t i = 0; i < count; ++i) text += " " + hex(entries_[entries_.size() - 1 - i].hash);
    if (count > 0) text += "\n" + entries_.back().text;
  }
  store_->set(key("shown", rank_), text);
}

std::optional<Ledger::Shown> Ledger::look(int rank) {
  const std::string where = key("shown", rank);
  if (!store_->check({where})) return std::nullopt;
  const std::string text = store_->get_to_str(where);
  Shown shown;
  std::string_view rest = text;
  if (const size_t line = rest.find('\n'); line != std::string_view::npos) {
    shown.text = rest.substr(line + 1);
    rest = rest.substr(0, line);
  }
  for (bool first = true; !rest.empty(); first = false) {
    const size_t end = std::min(rest.find(' '), rest.size());
    const uint64_t value = number(rest.substr(0, end));
    if (first) {
      shown.newest = value;
    } else {
      shown.hashes.push_back(value);
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return shown;
}

// The first collective, of those that both still know, that is another one there.
std::optional<uint64_t> Ledger::first_difference(const Shown& other) {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.sequence > other.newest) break;
    const uint64_t back = other.newest - entry.sequence;
    if (back < other.hashes.size() && other.hashes[back] != entry.hash) return entry.sequence;
  }
  return std::nullopt;
}

std::string Ledger::text_of(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.sequence == sequence) return entry.text;
  }
  return sequence > sequence_ ? "nothing so far" : "something too long ago";
}

// Ranks differ somewhere: tells what this one did there, and waits a while for the others.
void Ledger::answer() {
  if (answered_ || !store_->check({kDiffers})) return;
  answered_ = true;
  const uint64_t sequence = number(store_->get_to_str(kDiffers));
  store_->set(key("text", rank_), text_of(sequence));
  std::vector<std::string> texts(static_cast<size_t>(size_));
  for (int tries = 0; tries < kAsked; ++tries) {
    bool all = true;
    for (int rank = 0; rank < size_; ++rank) {
      std::string& text = texts[static_cast<size_t>(rank)];
      if (!text.empty()) continue;
      const std::string where = key("text", rank);
      if (store_->check({where})) text = store_->get_to_str(where);
      all &= !text.empty();
    }
    if (all) break;
    std::this_thread::sleep_for(kPause);
  }
  // A rank that has ended may have shown it before.
  for (int rank = 0; rank < size_; ++rank) {
    std::string& text = texts[static_cast<size_t>(rank)];
    if (!text.empty()) continue;
    if (const auto shown = look(rank); shown && shown->newest == sequence) text = shown->text;
  }
  const auto known = [](const std::string& text) {
    return text.empty() ? std::string("(no answer)") : text;
  };
  // The one that most of the others agree with is less likely to be wrong; of two, rank 0.
  const auto other = std::ranges::find_if(texts, [&](const std::string& text) {
    // lines may differ where the collective is the same
    return text.substr(0, text.find(" at ")) != texts[0].substr(0, texts[0].find(" at "));
  });
  const size_t rank =
      static_cast<size_t>((other == texts.end() ? texts.begin() + 1 : other) - texts.begin());
  fail(base::concat("ranks do different things: collective number ", sequence, " of the group is ",
                    known(texts[0]), " on rank 0, and ", known(texts[rank]), " on rank ", rank,
                    ". All ranks have to call the same collectives in the same order."));
}

void Ledger::fail(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = text;
  }
  if (!store_->check({kFailed})) store_->set(kFailed, text);
}

std::string Ledger::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool Ledger::pending() {
  const std::lock_guard lock(mutex_);
  return begun_ < sequence_;
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
    if (next > sequence_) return false;
  }
  const std::lock_guard looking(looking_);
  try {
    show();
    come_.resize(static_cast<size_t>(size_));
    for (int rank = 0; rank < size_; ++rank) {
      uint64_t& newest = come_[static_cast<size_t>(rank)];
      if (rank == rank_ || newest >= next) continue;
      if (const auto shown = look(rank)) newest = shown->newest;
      if (newest < next) return false;  // the others need not be asked before it comes
    }
  } catch (const std::exception&) {
    // the thread beside the program tells of it
  }
  return true;
}

void Ledger::tick() {
  if (store_ == nullptr) return;
  const uint64_t recorded = [&] {
    const std::lock_guard lock(mutex_);
    return sequence_;
  }();
  const std::lock_guard looking(looking_);
  // The store answers all ranks: the more they are, the more seldom each speaks to it.
  if (++ticks_ % (1 + size_ / kOften) != 0) return;
  // Who records nothing new may be what others wait for, or wait for them.
  if (recorded == std::exchange(last_, recorded)) show();
  if (ticks_ % (kLook * (1 + size_ / kOften)) != 0) return;
  show();
  if (store_->check({kFailed})) {
    const std::string text = store_->get_to_str(kFailed);
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
    return;
  }
  if (std::exchange(compared_, shown_) != shown_) compare_with_neighbours();
  answer();
}

// What differs anywhere differs between two neighbours, and the later of the two to show it sees
// it.
void Ledger::compare_with_neighbours() {
  for (const int by : {1, size_ - 1}) {
    const auto shown = look((rank_ + by) % size_);
    if (!shown.has_value()) continue;
    if (const auto sequence = first_difference(*shown)) {
      store_->compareSet(kDiffers, "", hex(*sequence));
    }
  }
}

uint64_t Ledger::begin() {
  if (store_ == nullptr) return 0;
  uint64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    sequence = ++begun_;
    if (!std::exchange(new_, false)) return sequence;
  }
  try {
    const std::lock_guard looking(looking_);
    show();
    compare_with_neighbours();
    answer();
  } catch (const std::exception&) {
    return sequence;  // the store is lost, which the thread beside tells
  }
  if (const std::string why = failure(); !why.empty()) {
    C10_THROW_ERROR(DistBackendError, "[torch.distributed] " + why);
  }
  return sequence;
}

// What the other ranks that have not come so far are known to have recorded.
std::string Ledger::others_at(uint64_t sequence) {
  std::string text;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const auto shown = look(rank);
    const char* comma = text.empty() ? "" : ", ";
    if (!shown.has_value()) {
      text += base::concat(comma, "rank ", rank, " has not told of any");
    } else if (const auto different = first_difference(*shown)) {
      store_->compareSet(kDiffers, "", hex(*different));
    } else if (shown->newest < sequence) {
      text += base::concat(comma, "rank ", rank, " has told of ", shown->newest);
    }
  }
  return text;
}

std::string Ledger::explain(uint64_t sequence, const std::string& error) {
  if (store_ == nullptr) return "";
  std::string said;
  if (sequence > 0) {  // else it is between two ranks
    said = base::concat("collective number ", sequence, " of the group, ", text_of(sequence));
  }
  try {
    const std::lock_guard looking(looking_);
    shown_ = 0;
    show();
    const std::string others = others_at(sequence);
    answer();
    if (const std::string why = failure(); !why.empty()) return base::concat(" (", why, ")");
    if (said.empty()) return "";
    if (!others.empty()) said += ", and " + others;
    fail(base::concat("rank ", rank_, " failed: ", error, " (in ", said, ")"));
    return base::concat(" (in ", said, ")");
  } catch (const std::exception&) {
    if (!said.empty()) said = base::concat("in ", said, ", and ");
    return base::concat(" (", said, "the group's store does not answer, so the process that keeps ",
                        "it, rank 0 or its launcher, may have ended: ",
                        runtime::text_of(std::current_exception()), ")");
  }
}

void Ledger::tell(const std::string& why) {
  if (store_ == nullptr) return;
  const std::lock_guard looking(looking_);
  fail(base::concat("rank ", rank_, " failed: ", why));
}

}  // namespace acc::distributed
