#include "lazy/exec/captured.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/errors.h"
#include "csrc/runtime/transfers.h"
#include "lazy/graph/draws.h"
#include "lazy/graph/words.h"

namespace acc::exec {
namespace {

using base::count;
using base::Counter;

std::shared_ptr<const uint64_t> next_number() {
  static std::atomic<uint64_t> last{0};
  return std::make_shared<const uint64_t>(last.fetch_add(1, std::memory_order_relaxed) + 1);
}

bool touches_host(const plan::Plan& plan, const plan::Step& step) {
  return std::ranges::any_of(plan::uses(plan, step), [&](const graph::Use& use) {
    return plan.program.buffers[use.buffer].kind == graph::BufferKind::kHost;
  });
}

const graph::Node& first_node(const plan::Plan& plan, const plan::Step& step) {
  return plan.program.nodes[step.nodes[0]];
}

// Counts why a step is called between the pieces, under the operator and its place in the program.
void count_outside(const char* why, const CaptureLimits& limits, const plan::Plan& plan,
                   const plan::Step& step) {
  const graph::Node& node = first_node(plan, step);
  const std::string place = limits.text(node.source);
  base::count_keyed(why, base::concat(node.op->name, place.empty() ? "" : " at ", place));
}

// Per step, whether it is captured.
std::vector<bool> inside(const CaptureLimits& limits) {
  std::vector<bool> captured = limits.outside;
  captured.flip();
  return captured;
}

char* address_of(const Given& given) {
  return static_cast<char*>(const_cast<void*>(given.memory.data())) + given.byte_offset;
}

size_t rest_of(const Given& given) {
  const auto offset = static_cast<size_t>(given.byte_offset);
  return given.memory.nbytes() - std::min(offset, given.memory.nbytes());
}

}  // namespace

bool CaptureLimits::leave_outside(const plan::Plan& plan, const plan::Schedule& schedule,
                                  size_t step) {
  if (outside[step]) return false;
  outside[step] = true;
  const graph::Node& begin = first_node(plan, schedule.steps[step]);
  if (begin.op->await == nullptr) return true;
  const auto ticket = [&](const graph::Node& node) {
    return graph::transfer_ticket(plan.program, node);
  };
  for (size_t later = step + 1; later < schedule.steps.size(); ++later) {
    const graph::Node& node = first_node(plan, schedule.steps[later]);
    if (node.op != begin.op->await || ticket(node) != ticket(begin)) continue;
    outside[later] = true;
    break;
  }
  return true;
}

void CaptureLimits::postpone() {
  // A capture that finds no memory costs a run and empties the allocator's cache.
  constexpr int kMostPassed = 64;
  if (std::exchange(postponed, true)) return;
  passed = std::min(1 << std::min(no_memory++, 16), kMostPassed) - 1;
}

Captured::Captured(const plan::Plan& plan, const plan::Schedule& schedule, c10::DeviceIndex device,
                   CaptureLimits& limits, std::span<const int64_t> values)
    : plan_(plan),
      schedule_(schedule),
      device_(device),
      limits_(limits),
      number_(next_number()),
      prepared_(prepare(plan, schedule, device, inside(limits))),
      pool_(runtime::backend().open_pool(device)),
      values_(values.begin(), values.end()),
      copies_(plan.program.buffers.size()),
      extents_(plan.program.buffers.size()),
      written_(plan.program.buffers.size()) {
  count(Counter::Captures);
  find_extents();
}

void Captured::find_extents() {
  for (const plan::Step& step : schedule_.steps) {
    for (const uint32_t index : step.nodes) {
      for (const graph::Use& use : graph::uses(plan_.program, plan_.program.nodes[index])) {
        extents_[use.buffer] = std::max(extents_[use.buffer], use.end_byte);
        if (use.writes) written_[use.buffer] = true;
      }
    }
  }
}

Run Captured::begin(std::vector<Given>& given) {
  for (size_t i = 0; i < given.size(); ++i) {
    if (!limits_.copied[i] || !given[i].memory) continue;
    // A workspace is promised empty: all that there is of it is read.
    const bool workspace = plan_.program.buffers[i].nbytes == 0;
    copies_[i] = allocate(workspace ? rest_of(given[i]) : static_cast<uint64_t>(extents_[i]));
    copy_input(static_cast<uint32_t>(i), given[i]);
    given[i] = {copies_[i], 0};
  }
  find_inputs(given);
  return Run(plan_, schedule_, *prepared_, device_, given, /*is_captured=*/true);
}

void Captured::find_inputs(const std::vector<Given>& given) {
  for (const PreparedStep& step : prepared_->steps) {
    if (step.kernel != nullptr) step.kernel->list(&address_words_, &number_words_);
  }
  std::ranges::stable_sort(address_words_, {}, &TableWord::of);
  for (uint32_t i = 0; i < given.size(); ++i) {
    if (!given[i].memory) continue;
    const auto words = std::ranges::equal_range(address_words_, i, {}, &TableWord::of);
    if (copies_[i]) {
      copied_.push_back(i);
    } else {
      inputs_.push_back({i, nullptr, 0, words});
    }
  }
}

void Captured::note(size_t index) {
  PreparedStep& step = prepared_->steps[index];
  runtime::backend().note([this, index, &step] {
    *submission_->step = index;
    if (!is_needed(index)) return;
    prepare_for(index);
    if (step.kernel != nullptr) return step.kernel->launch();
    repeat(step, values_, prepared_->fixed);
  });
}

// Calls an operator once more. What it makes goes where its results went when it was captured.
void Captured::repeat(const PreparedStep& step, std::span<const int64_t> values,
                      const std::vector<library::Slot>& slots) {
  const torch::jit::Stack results = step.call->run(values);
  for (const Result& result : step.results) {
    const at::Tensor& tensor = result.of(results);
    if (!tensor.defined()) continue;
    const graph::TensorWords promised = graph::read_tensor(result.word);
    const library::Slot& slot = slots[static_cast<size_t>(promised.buffer)];
    if (as_promised(tensor, promised) && tensor.storage().nbytes() <= slot->nbytes()) {
      runtime::backend().copy(slot->mutable_data(), tensor.storage().data(),
                              tensor.storage().nbytes(), device_);
    } else {
      library::alias(result.word, slot).copy_(tensor, /*non_blocking=*/true);
    }
  }
}

void Captured::join_transfers() {
  const size_t cut_short = runtime::join_forked_transfers();
  if (cut_short == 0) return;
  base::count_keyed("transfers_cut_short", "end of a piece", cut_short);
  runtime::backend().note([] { runtime::join_forked_transfers(); });
}

void Captured::add_piece(size_t begin, size_t end, std::unique_ptr<runtime::CapturedWork> work) {
  size_t launches = 0;
  for (size_t step = begin; step < end; ++step) {
    if (const auto& kernel = prepared_->steps[step].kernel) launches += kernel->launches();
  }
  pieces_.push_back({begin, end, std::move(work), launches});
}

void Captured::finish(const Run& run) {
  if (!capturing_) return;
  pool_->close();
  capturing_ = false;
  captured_ = true;
  const auto took = std::chrono::steady_clock::now() - began_;
  count(Counter::CaptureUs,
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
  outputs_ = run.outputs();
  for (const Piece& piece : pieces_) {
    if (piece.work == nullptr) continue;
    for (size_t step = piece.begin; step < piece.end; ++step) fix(step);
  }
}

// Remembers what the operator of a captured step was given.
void Captured::fix(size_t index) {
  const plan::Step& step = schedule_.steps[index];
  if (step.kernel != plan::kNoKernel) return;
  const graph::Node& node = first_node(plan_, step);
  const uint32_t n = node.n_values - (graph::reads_philox_tensor(*node.op) ? 2 : 0);
  for (uint32_t i = node.values; i < node.values + n; ++i) {
    numbers_.push_back({i, static_cast<uint32_t>(index), values_[i]});
  }
  for (const graph::Use& use : graph::uses(plan_.program, node)) {
    if (schedule_.places[use.buffer] != plan::Place::kGiven || copies_[use.buffer]) continue;
    if (std::ranges::find(addresses_, use.buffer, &FixedAddress::buffer) != addresses_.end()) {
      continue;
    }
    addresses_.push_back({use.buffer, prepared_->fixed[use.buffer]->data()});
  }
}

void Captured::give_up() noexcept {
  capturing_ = false;
  pieces_.clear();
  pool_.reset();
}

bool Captured::fits(const std::vector<Given>& given, std::span<const int64_t> values) const {
  return std::ranges::all_of(
             numbers_, [&](const auto& fixed) { return values[fixed.value] == fixed.bits; }) &&
         std::ranges::all_of(addresses_, [&](const auto& fixed) {
           return address_of(given[fixed.buffer]) == fixed.address;
         });
}

void Captured::learn(const std::vector<Given>& given, std::span<const int64_t> values) {
  for (const FixedNumber& fixed : numbers_) {
    if (values[fixed.value] != fixed.bits) leave_outside(fixed.step, "not_captured/number");
  }
  for (const FixedAddress& fixed : addresses_) {
    if (address_of(given[fixed.buffer]) == fixed.address) continue;
    base::count_keyed("captured_again", "address");
    if (!was_worth_it()) has_moved(fixed.buffer);
  }
}

void Captured::has_moved(uint32_t buffer) {
  const int times = ++limits_.moved[buffer];
  if (!written_[buffer] && !plan_.program.buffers[buffer].written) {
    if (times == 1 || limits_.copied[buffer]) return;
    limits_.copied[buffer] = true;
    return base::count_keyed("captured_again", "copied");
  }
  // It has to be written where it is.
  if (times <= kMostMoves) return;
  for (uint32_t step = 0; step < schedule_.steps.size(); ++step) {
    if (schedule_.steps[step].kernel != plan::kNoKernel) continue;
    const auto uses = plan::uses(plan_, schedule_.steps[step]);
    if (std::ranges::find(uses, buffer, &graph::Use::buffer) == uses.end()) continue;
    leave_outside(step, "not_captured/address");
  }
}

void Captured::leave_outside(size_t step, const char* why) {
  if (!limits_.leave_outside(plan_, schedule_, step)) return;
  count_outside(why, limits_, plan_, schedule_.steps[step]);
}

void Captured::copy_input(uint32_t buffer, const Given& given) {
  runtime::backend().copy(copies_[buffer].mutable_data(), address_of(given),
                          std::min(copies_[buffer].nbytes(), rest_of(given)), device_);
}

void Captured::point(Input& input, const Given& given) {
  char* const address = address_of(given);
  const size_t nbytes = rest_of(given);
  if (filled_ && address == input.address && nbytes == input.nbytes) return;
  library::point(prepared_->slots[input.buffer], address, nbytes);
  input.address = address;
  input.nbytes = nbytes;
  if (!filled_) return;
  for (const TableWord& word : input.words) {
    prepared_->table.set(word.at, reinterpret_cast<int64_t>(address) + word.byte_offset);
  }
}

void Captured::begin(const std::vector<Given>& given, std::span<const int64_t> values) {
  count(Counter::CapturesSubmitted);
  if (++submitted_ == kWorthIt) {
    --limits_.begun;
    limits_.no_memory = 0;
  }
  submission_ = nullptr;
  for (const uint32_t buffer : copied_) copy_input(buffer, given[buffer]);
  for (Input& input : inputs_) point(input, given[input.buffer]);
  if (filled_) {
    for (const TableWord& word : number_words_) prepared_->table.set(word.at, values[word.of]);
    prepared_->table.upload_changed();
  } else {
    for (PreparedStep& prepared : prepared_->steps) {
      if (prepared.kernel != nullptr) prepared.kernel->set(values);
    }
    prepared_->table.upload_all();
    filled_ = true;
  }
  piece_ = 0;
  in_piece_ = false;
}

void Captured::go_on(std::span<const int64_t> values, const Submission& submission) {
  submission_ = &submission;
  for (; piece_ < pieces_.size(); ++piece_) {
    const Piece& piece = pieces_[piece_];
    if (piece.work == nullptr) {
      *submission.step = piece.begin;
      if (is_needed(piece.begin)) call_outside(piece.begin, values);
    } else if (in_piece_ && piece.work->begun()) {
      piece.work->go_on();
      in_piece_ = false;
    } else {
      *submission.step = piece.begin;
      if (submission.profile.observed()) submission.profile.begin_piece(piece.end - piece.begin);
      count(Counter::CapturedLaunches);
      count(Counter::KernelLaunches, piece.launches);
      runtime::fork_transfers();
      in_piece_ = true;
      piece.work->submit();
      in_piece_ = false;
    }
  }
  *submission.step = schedule_.steps.size();
  count(Counter::Steps, schedule_.steps.size());
}

bool Captured::is_needed(size_t step) const {
  const std::vector<bool>& needed = submission_->needed;
  return needed.empty() || std::ranges::any_of(schedule_.steps[step].nodes,
                                               [&](uint32_t node) { return needed[node]; });
}

void Captured::prepare_for(size_t step) {
  submission_->ambient.set(first_node(plan_, schedule_.steps[step]).ambient);
  Profile& profile = submission_->profile;
  if (!profile.observed()) return;
  const PreparedStep& prepared = prepared_->steps[step];
  profile.begin_step(step, prepared.call.has_value() ? &prepared.call->arguments() : nullptr);
}

void Captured::call_outside(size_t step, std::span<const int64_t> values) {
  prepare_for(step);
  const PreparedStep& prepared = prepared_->steps[step];
  if (prepared.kernel != nullptr) {
    count(Counter::KernelLaunches, prepared.kernel->launches());
    prepared.kernel->launch();
  } else {
    repeat(prepared, values, prepared_->slots);
  }
}

bool Captured::may_go_on() const {
  if (submission_ == nullptr || piece_ == pieces_.size()) return false;
  const Piece& piece = pieces_[piece_];
  if (piece.work != nullptr && !piece.work->begun()) return true;
  if (piece.work != nullptr && !piece.work->may_go_on()) return false;
  return may_repeat(plan_, schedule_.steps[*submission_->step]);
}

uint64_t Captured::host_bytes() const {
  // As in Plan::bytes: the prepared calls hold about a tensor object per operand.
  constexpr uint64_t kPreparedBytesPerWord = 40;
  uint64_t calls = 0;
  for (const Piece& piece : pieces_) {
    if (piece.work != nullptr) calls += piece.end - piece.begin;
  }
  const size_t buffers = plan_.program.buffers.size();
  return sizeof(Captured) + plan_.program.words.size() * kPreparedBytesPerWord +
         buffers * (2 * sizeof(c10::StorageImpl) + 2 * sizeof(c10::Storage) + sizeof(int64_t)) +
         values_.size() * sizeof(int64_t) + numbers_.size() * sizeof(FixedNumber) +
         addresses_.size() * sizeof(FixedAddress) + pieces_.size() * sizeof(Piece) +
         (address_words_.size() + number_words_.size()) * sizeof(TableWord) +
         inputs_.size() * sizeof(Input) + calls * runtime::backend().host_bytes_per_call();
}

Captures::Captures(const plan::Plan& plan, const plan::Schedule& schedule,
                   std::string (*text)(uint32_t place))
    : plan_(plan), schedule_(schedule) {
  limits_.text = text;
  limits_.moved.resize(plan.program.buffers.size());
  limits_.copied.resize(plan.program.buffers.size());
  limits_.outside.resize(schedule.steps.size());
  // NCCL wants each launch of a captured collective to be one of all ranks, and these run different
  // plans (docs/gpu.md).
  const bool others = !runtime::on_host() && runtime::chooses_alike();
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const plan::Step& step = schedule.steps[i];
    // Snapshots of the CPU's tensors lie elsewhere each time.
    const bool host = touches_host(plan, step);
    if (!host && !(others && first_node(plan, step).op->communicates)) continue;
    limits_.leave_outside(plan, schedule, i);
    count_outside(host ? "not_captured/host memory" : "not_captured/other processes", limits_, plan,
                  step);
  }
}

void Captures::leave_outside(size_t step, const std::exception_ptr& error) {
  limits_.leave_outside(plan_, schedule_, step);
  count_outside("not_captured/failed", limits_, plan_, schedule_.steps[step]);
  runtime::warn_once(base::concat(
      "[graphs] ", first_node(plan_, schedule_.steps[step]).op->name,
      " cannot be part of captured work and is called between its pieces from now on: ",
      runtime::text_of(error)));
}

void Captures::leave_all_outside(const std::exception_ptr& error) {
  limits_.begun = std::numeric_limits<int>::max();
  base::count_keyed("not_captured/failed", "all");
  runtime::warn_once(
      base::concat("[graphs] a step could not be captured and goes operator by "
                   "operator from now on: ",
                   runtime::text_of(error)));
}

Captured* Captures::find(const std::vector<Given>& given, std::span<const int64_t> values) {
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (!(*kept)->fits(given, values)) continue;
    std::rotate(kept_.begin(), kept, kept + 1);
    return kept_.front().get();
  }
  if (!kept_.empty()) kept_.front()->learn(given, values);
  return nullptr;
}

bool Captures::wants_more() {
  if (limits_.begun >= kMost) return false;
  if (limits_.passed == 0) return true;
  --limits_.passed;
  return false;
}

void Captures::found_no_memory() {
  --limits_.begun;
  limits_.postpone();
}

void Captures::keep(std::unique_ptr<Captured> captured) {
  kept_.insert(kept_.begin(), std::move(captured));
  if (kept_.size() > kKept) kept_.pop_back();
}

void Captures::drop_all() {
  const auto wasted =
      std::ranges::count_if(kept_, [](const auto& captured) { return !captured->was_worth_it(); });
  kept_.clear();
  if (wasted == 0) return;
  limits_.begun -= static_cast<int>(wasted);
  limits_.postpone();
}

uint64_t Captures::host_bytes() const {
  uint64_t bytes = 0;
  for (const auto& kept : kept_) bytes += kept->host_bytes();
  return bytes;
}

void Captures::drop(const Captured* captured) {
  std::erase_if(kept_, [&](const auto& kept) { return kept.get() == captured; });
}

}  // namespace acc::exec
