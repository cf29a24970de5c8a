#include "csrc/runtime/generator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/draws.h"
#include "csrc/runtime/fork.h"

namespace acc::runtime {

class PhiloxState {
 public:
  std::pair<uint64_t, uint64_t> get() const {
    const std::lock_guard lock(mutex_);
    return {seed_, offset_};
  }
  void set(uint64_t seed, uint64_t offset) {
    const std::lock_guard lock(mutex_);
    seed_ = seed;
    offset_ = offset;
  }
  void set_offset(uint64_t offset) {
    const std::lock_guard lock(mutex_);
    offset_ = offset;
  }
  std::pair<uint64_t, uint64_t> advance(uint64_t increments) {
    const std::lock_guard lock(mutex_);
    const uint64_t begin = offset_;
    offset_ += increments;
    return {seed_, begin};
  }

 private:
  mutable std::mutex mutex_;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

namespace {

// One Philox round makes four numbers, so an offset counts in fours.
constexpr uint64_t kNumbersPerRound = 4;
constexpr size_t kSeedBytes = sizeof(uint64_t);
constexpr size_t kStateBytes = 2 * sizeof(uint64_t);

void check_offset(uint64_t offset) {
  ACC_CHECK(offset % kNumbersPerRound == 0, "[torch.Generator] the offset ", offset,
            " is not a multiple of ", kNumbersPerRound, ". Use offsets that get_offset returned.");
}

// The draws of a step that is being captured.
std::atomic<bool> logging{false};
std::mutex log_mutex;
std::vector<StreamEvent>& draw_log() {
  static auto* const log = new std::vector<StreamEvent>;
  return *log;
}

void note_event(StreamEvent::What what, const std::shared_ptr<PhiloxState>& stream,
                const Position& from, Generator* generator) {
  if (!logging.load(std::memory_order_relaxed)) return;
  c10::intrusive_ptr<Generator> held;
  if (generator != nullptr) held = c10::intrusive_ptr<Generator>::reclaim_copy(generator);
  const c10::weak_intrusive_ptr<Generator> weak(held);
  const std::lock_guard lock(log_mutex);
  draw_log().push_back({what, stream, from, position(*stream), weak});
}

c10::DeviceIndex or_current(c10::DeviceIndex device) {
  if (device < 0) return backend().current_device();
  check_device(device);
  return device;
}

struct Defaults {
  struct Slot {
    std::once_flag once;
    at::Generator generator;
  };
  std::array<Slot, size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1> slots;
  std::mutex mutex;              // of seeding all and of making one
  std::optional<uint64_t> seed;  // of those that are not made yet
};

// Never destroyed: Python may hold the generators longer than static destructors allow.
Defaults& defaults() {
  static auto* const all = new Defaults;
  return *all;
}

}  // namespace

Generator::Generator(c10::DeviceIndex device)
    : Generator(device, std::make_shared<PhiloxState>()) {}

Generator::Generator(c10::DeviceIndex device, std::shared_ptr<PhiloxState> state)
    : c10::GeneratorImpl(acc_device(or_current(device)),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

Generator::~Generator() = default;

std::pair<uint64_t, uint64_t> Generator::reserve(uint64_t increments) {
  const auto piece =
      state_->advance((increments + kNumbersPerRound - 1) / kNumbersPerRound * kNumbersPerRound);
  note_event(StreamEvent::What::kDrawn, state_, {piece.first, piece.second}, this);
  return piece;
}

void log_draws() {
  const std::lock_guard lock(log_mutex);
  draw_log().clear();
  logging.store(true);
}

std::vector<StreamEvent> logged_draws() {
  const std::lock_guard lock(log_mutex);
  logging.store(false);
  return std::exchange(draw_log(), {});
}

Position position(const PhiloxState& stream) {
  const auto [seed, offset] = stream.get();
  return {seed, offset};
}

Position advance(PhiloxState& stream, uint64_t increments) {
  const auto [seed, offset] = stream.advance(increments);
  return {seed, offset};
}

void move_to(PhiloxState& stream, const Position& position) {
  stream.set(position.seed, position.offset);
}

void Generator::set_current_seed(uint64_t seed) {
  const Position from = position(*state_);
  state_->set(seed, 0);
  note_event(StreamEvent::What::kSeeded, state_, from, this);
}

uint64_t Generator::current_seed() const { return state_->get().first; }

// For putting it back there.
Position Generator::read() const {
  const Position at = position(*state_);
  note_event(StreamEvent::What::kRead, state_, at, nullptr);
  return at;
}

uint64_t Generator::seed() {
  const uint64_t seed = c10::detail::getNonDeterministicRandom(true);
  set_current_seed(seed);
  return seed;
}

void Generator::set_offset(uint64_t offset) {
  check_offset(offset);
  const Position from = position(*state_);
  state_->set_offset(offset);
  note_event(StreamEvent::What::kSet, state_, from, this);
}

uint64_t Generator::get_offset() const { return read().offset; }

void Generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  const auto bytes = static_cast<size_t>(state.numel());
  ACC_CHECK(bytes == kStateBytes || bytes == kSeedBytes, "[torch.Generator] a state of ", bytes,
            " bytes is not one of the acc device, whose states have ", kStateBytes,
            ". States of the CPU's generator do not fit; save torch.acc.get_rng_state().");
  const auto* from = static_cast<const char*>(state.data());
  uint64_t seed = 0;
  uint64_t offset = 0;
  std::memcpy(&seed, from, kSeedBytes);
  if (bytes == kStateBytes) std::memcpy(&offset, from + kSeedBytes, sizeof(offset));
  check_offset(offset);
  const Position before = position(*state_);
  state_->set(seed, offset);
  note_event(StreamEvent::What::kSet, state_, before, this);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  const auto [seed, offset] = read();
  at::TensorBase state =
      at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, at::kByte, false, std::nullopt);
  auto* to = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(to, &seed, sizeof(seed));
  std::memcpy(to + kSeedBytes, &offset, sizeof(offset));
  return state.getIntrusivePtr();
}

c10::intrusive_ptr<c10::GeneratorImpl> Generator::graphsafe_get_state() const {
  return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(new Generator(device().index(), state_));
}

void Generator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& generator) {
  auto* other = dynamic_cast<Generator*>(generator.get());
  ACC_CHECK(other != nullptr,
            "[torch.Generator] graphsafe_set_state was given a generator of "
            "another device. Make it with torch.Generator('acc').");
  note_event(StreamEvent::What::kLeft, state_, position(*state_), this);
  state_ = other->state_;
}

Generator* Generator::clone_impl() const {
  auto state = std::make_shared<PhiloxState>();
  const auto [seed, offset] = read();
  state->set(seed, offset);
  return new Generator(device().index(), std::move(state));
}

at::Generator make_generator(c10::DeviceIndex device) {
  note_use();
  return at::make_generator<Generator>(device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  const c10::DeviceIndex index = or_current(device);
  Defaults& all = defaults();
  Defaults::Slot& slot = all.slots[static_cast<size_t>(index)];
  std::call_once(slot.once, [&] {
    at::Generator made = make_generator(index);
    const std::lock_guard lock(all.mutex);
    // Not `seed`, which a step that is being captured would have done.
    move_to(*made.get<Generator>()->state_,
            {all.seed ? *all.seed : c10::detail::getNonDeterministicRandom(true), 0});
    slot.generator = std::move(made);
  });
  return slot.generator;
}

void seed_all(uint64_t seed) {
  Defaults& all = defaults();
  const std::lock_guard lock(all.mutex);
  all.seed = seed;
  for (Defaults::Slot& slot : all.slots) {
    if (slot.generator.defined()) slot.generator.get<Generator>()->set_current_seed(seed);
  }
}

Generator& generator_or_default(const std::optional<at::Generator>& generator,
                                c10::DeviceIndex device) {
  return *at::get_generator_or_default<Generator>(generator, default_generator(device));
}

}  // namespace acc::runtime
