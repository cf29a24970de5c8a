#include "distributed/sizes.h"

#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "csrc/base/check.h"
#include "distributed/signs.h"
#include "distributed/texts.h"

namespace acc::distributed {
namespace {

// A rank may be so far ahead of another, in what is new.
constexpr size_t kLines = 8;
// Of a program whose messages are always new, only the first are compared.
constexpr size_t kMet = 4096;

// Elements of each rank's part, of `tensor` with so many rows of each; none: equal parts.
void add_parts(std::vector<int64_t>& parts, const at::Tensor& tensor, at::IntArrayRef rows,
               int size) {
  const int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (rows.empty()) parts.insert(parts.end(), static_cast<size_t>(size), tensor.numel() / size);
  for (const int64_t n : rows) parts.push_back(all == 0 ? 0 : n * (tensor.numel() / all));
}

// Where the one who sends shows it, and the one who receives.
std::string key_of(bool sends, int from, int to, int tag) {
  return base::concat(sends ? "sent/" : "received/", from, "/", to, "/", tag);
}

}  // namespace

void Lines::add(uint64_t number, std::string line) {
  lines_[number] = std::move(line);
  if (lines_.size() > kLines) lines_.erase(lines_.begin());
}

std::string Lines::text() const {
  std::string text;
  for (const auto& [number, line] : lines_) text += base::concat(number, " ", line, "\n");
  return text;
}

Lines Lines::read(const std::string& text) {
  Lines lines;
  std::istringstream all(text);
  uint64_t number = 0;
  for (std::string line; all >> number && std::getline(all >> std::ws, line);) {
    lines.add(number, line);
  }
  return lines;
}

std::vector<int64_t> parts_of(Collective collective, const std::vector<at::Tensor>& outputs,
                              const std::vector<at::Tensor>& inputs, at::IntArrayRef options,
                              int size) {
  std::vector<int64_t> parts;
  if (collective == Collective::kAllToAll) {
    for (const at::Tensor& input : inputs) parts.push_back(input.numel());
    for (const at::Tensor& output : outputs) parts.push_back(output.numel());
  } else if (collective == Collective::kAllToAllSingle) {
    const auto received = static_cast<size_t>(options[0]);
    add_parts(parts, inputs[0], options.slice(1 + received), size);
    add_parts(parts, outputs[0], options.slice(1, received), size);
  }
  return parts;
}

void Parts::add(uint64_t sequence, const std::vector<int64_t>& parts) {
  const size_t size = parts.size() / 2;
  const auto text = [](int64_t part) { return hex(static_cast<uint64_t>(part)); };
  const std::lock_guard lock(mutex_);
  lines_.resize(size);
  for (size_t other = 0; other < size; ++other) {
    lines_[other].add(sequence, text(parts[other]) + " " + text(parts[size + other]));
  }
}

void Parts::remove(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  for (Lines& lines : lines_) lines.remove(sequence);
}

// What a rank shows is by whom it is for: each reads of the others what they have with it.
Parts::Difference Parts::compare(c10d::Store& store, int rank, const NameOf& name) {
  std::vector<Lines> own;
  {
    const std::lock_guard lock(mutex_);
    own = lines_;
  }
  if (own.empty()) return {};
  const int size = static_cast<int>(own.size());
  std::vector<std::string> keys;
  std::vector<std::vector<uint8_t>> values;
  for (int other = 0; other < size; ++other) {
    const std::string text = own[static_cast<size_t>(other)].text();
    keys.push_back(base::concat("parts/", other, "/", rank));
    values.emplace_back(text.begin(), text.end());
  }
  store.multiSet(keys, values);
  const Texts shown = of_ranks(store, base::concat("parts/", rank).c_str(), size);
  for (int other = 0; other < size; ++other) {
    const auto& text = shown[static_cast<size_t>(other)];
    if (!text.has_value()) continue;
    const Lines there = Lines::read(*text);
    for (const auto& [sequence, line] : own[static_cast<size_t>(other)].all()) {
      const auto found = there.all().find(sequence);
      if (found == there.all().end()) continue;
      const std::vector<uint64_t> here = numbers(line);
      const std::vector<uint64_t> others = numbers(found->second);
      const auto differ = [&](int from, uint64_t sent, int to, uint64_t room) {
        return base::concat(name(from), " sends ", sent, " elements to ", name(to),
                            ", which has room for ", room);
      };
      if (here.at(0) != others.at(1)) {
        return {sequence, differ(rank, here[0], other, others[1])};
      }
      if (others.at(0) != here.at(1)) {
        return {sequence, differ(other, others[0], rank, here[1])};
      }
    }
  }
  return {};
}

std::optional<uint64_t> Messages::number_if_new(const Message& message) {
  const std::lock_guard lock(mutex_);
  if (message.peer < 0) from_anybody_.insert(message.tag);
  if (from_anybody_.contains(message.tag) || met_.size() >= kMet) return std::nullopt;
  const Way way = way_of(message);
  if (!met_.emplace(way, message.what).second) return std::nullopt;
  return counts_[way];
}

std::string Messages::compare(c10d::Store& store, int rank, const Message& message, uint64_t number,
                              const NameOf& name) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    const Way way = way_of(message);
    lines_[way].add(number, message.what);
    text = lines_[way].text();
  }
  const int from = message.sends ? rank : message.peer;
  const int to = message.sends ? message.peer : rank;
  store.set(key_of(message.sends, from, to, message.tag), text);
  const std::string other = key_of(!message.sends, from, to, message.tag);
  if (!store.check({other})) return "";
  const Lines lines = Lines::read(store.get_to_str(other));
  const auto there = lines.all().find(number);
  if (there == lines.all().end() || there->second == message.what) return "";
  const std::string& sent = message.sends ? message.what : there->second;
  const std::string& room = message.sends ? there->second : message.what;
  return base::concat(name(from), " sends ", sent, " to ", name(to), ", which receives ", room,
                      " (message number ", number + 1, " between them with tag ", message.tag, ")");
}

void Messages::count(const Message& message) {
  const std::lock_guard lock(mutex_);
  ++counts_[way_of(message)];
}

}  // namespace acc::distributed
