#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <utility>

// Random streams of the acc device: a Philox 4x32-10 key (the seed) and an offset, both kept on the
// host, so that reading, saving and setting the state never waits for the device.
namespace acc::runtime {

// What generators share after graphsafe_get_state. Thread safe.
class PhiloxState;
struct Position;

class Generator final : public c10::GeneratorImpl {
 public:
  // `device` negative: the current one. Seeded with torch's default seed.
  explicit Generator(c10::DeviceIndex device);
  ~Generator() override;

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  // Hands out a piece of the stream: returns the seed and the offset where it begins, and moves the
  // offset on by `increments`, rounded up to a multiple of 4 as CUDA's generators do. Takes its own
  // lock; may be called with the generator's mutex held or not.
  std::pair<uint64_t, uint64_t> reserve(uint64_t increments);

  void set_current_seed(uint64_t seed) override;  // and offset 0
  uint64_t current_seed() const override;
  uint64_t seed() override;  // takes a random seed and returns it
  // Offsets are multiples of 4.
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  // 16 bytes on the CPU: seed and offset, little-endian, as CUDA's. `set_state` takes 8 as well: a
  // seed with offset 0.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // A generator that shares this one's stream; and to share another one's.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& generator) override;
  const std::shared_ptr<PhiloxState>& stream() const { return state_; }

 private:
  Generator(c10::DeviceIndex device, std::shared_ptr<PhiloxState> state);
  Generator* clone_impl() const override;
  Position read() const;
  friend const at::Generator& default_generator(c10::DeviceIndex device);

  std::shared_ptr<PhiloxState> state_;
};

// A new generator; `device` negative: on the current device.
at::Generator make_generator(c10::DeviceIndex device);

// The generator that operators of a device use when they are given none. Starts with a random seed,
// as CUDA's. `device` negative: of the current device.
const at::Generator& default_generator(c10::DeviceIndex device);

// Seeds the default generators of all devices, those that come later too. No device is used, nor
// asked for, so that the process may fork.
void seed_all(uint64_t seed);

// `generator`, or the default one of `device`, as this class. Throws for a generator of another
// device type.
Generator& generator_or_default(const std::optional<at::Generator>& generator,
                                c10::DeviceIndex device);

}  // namespace acc::runtime
