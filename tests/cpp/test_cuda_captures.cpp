// What captured work has its memory from, who holds it beside torch's graphs, what these warn of,
// and where torch's generator draws for it. It needs no GPU: pinned memory is that of torch's own
// allocator, which is asked for none, and the one of a device is played.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/runtime/cuda_draws.h"
#include "csrc/runtime/cuda_pools.h"
#include "csrc/runtime/cuda_warnings.h"

namespace acc::runtime {
namespace {

// A pool, and how often it is held. Those of a device are nothing but that.
struct Counted {
  std::unique_ptr<AllocatorPool> real;
  int holders = 0;
  bool begun = false;
};

class CountedPool final : public AllocatorPool {
 public:
  explicit CountedPool(Counted& counted) : counted_(counted) {}
  void begin() override {
    if (counted_.real) counted_.real->begin();
    if (std::exchange(counted_.begun, true)) throw std::runtime_error("has begun already");
    ++counted_.holders;
  }
  void end() override {
    if (counted_.real) counted_.real->end();
    if (!std::exchange(counted_.begun, false)) throw std::runtime_error("has not begun");
  }
  void release() override {
    if (counted_.real) counted_.real->release();
    if (--counted_.holders < 0) throw std::runtime_error("nobody holds it");
  }

 private:
  Counted& counted_;
};

// The pools of one id, and what torch's graphs do with them.
struct Pools {
  Counted of_device;
  Counted of_pinned{pinned_pool(new_id())};
  CountedPool device{of_device};
  CountedPool pinned{of_pinned};
  std::shared_ptr<PrivatePool> pool = std::make_shared<PrivatePool>(
      std::make_unique<CountedPool>(of_device), std::make_unique<CountedPool>(of_pinned));

  void begin() {
    device.begin();
    pinned.begin();
  }
  void end() {
    device.end();
    pinned.end();
  }
  void release() {
    device.release();
    pinned.release();
  }
  void expect(int holders, bool open) const {
    EXPECT_EQ(of_device.holders, holders);
    EXPECT_EQ(of_pinned.holders, holders);
    EXPECT_EQ(of_device.begun, open);
    EXPECT_FALSE(of_pinned.begun);
  }

 private:
  static c10::MempoolId_t new_id() {
    static c10::CaptureId_t last = 0;
    return {0, ++last};
  }
};

bool some_open() {
  bool none = false;
  OpenPool::when_none([&] { none = true; });
  return !none;
}

TEST(CudaPools, ServeAnotherGraphWhenTheOnlyOneIsGone) {
  Pools pools;
  OpenPool open(pools.pool);
  for (int i = 0; i < 3; ++i) {
    open.lend();
    pools.begin();
    pools.end();
    open.open();
    pools.release();
    pools.expect(1, /*open=*/true);
  }
}

TEST(CudaPools, AreHeldOnceHoweverOftenTheyAreOpened) {
  Pools pools;
  for (int i = 0; i < 3; ++i) OpenPool{pools.pool};
  pools.expect(1, /*open=*/false);
  pools.pool.reset();
  pools.expect(0, /*open=*/false);
}

TEST(CudaPools, AreNotHeldByCapturesThatFailedToBegin) {
  for (const int begun : {0, 1, 2}) {  // none, the device's, both
    Pools pools;
    OpenPool open(pools.pool);
    open.lend();
    if (begun > 0) pools.device.begin();
    if (begun > 1) pools.pinned.begin();
    open.take_back(/*begun=*/false);
    pools.expect(1, /*open=*/false);
  }
}

TEST(CudaPools, AreNotHeldByCapturesThatFailed) {
  for (const bool ended : {false, true}) {  // by torch 2.11 and 2.12, and by 2.13
    Pools pools;
    OpenPool open(pools.pool);
    open.lend();
    pools.begin();
    if (ended) pools.end();
    open.take_back(/*begun=*/true);
    pools.expect(1, /*open=*/false);
  }
}

TEST(CudaPools, AreOpenWhileTheyAreLentToCaptures) {
  EXPECT_FALSE(some_open());
  Pools pools;
  Pools others;
  {
    OpenPool open(pools.pool);
    open.lend();
    EXPECT_TRUE(some_open());
    EXPECT_FALSE(pools.of_device.begun);
    {
      OpenPool other(others.pool);
      other.close();
      other.close();
      EXPECT_TRUE(some_open());
    }
    EXPECT_TRUE(some_open());
    open.open();
    EXPECT_TRUE(pools.of_device.begun);
    EXPECT_TRUE(some_open());
    open.close();
    EXPECT_FALSE(pools.of_device.begun);
    EXPECT_FALSE(some_open());
  }
  EXPECT_FALSE(some_open());
  {
    OpenPool open(pools.pool);
    open.lend();
    pools.begin();
    open.take_back(/*begun=*/true);
    EXPECT_TRUE(some_open());
  }
  EXPECT_FALSE(some_open());
}

struct Heard final : c10::WarningHandler {
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST(CudaGraphs, WithoutNodesAreNoMistake) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  const auto end = [](const char* other) {
    TORCH_WARN("The CUDA Graph is empty. This usually means that ...");
    TORCH_WARN(other);
  };
  {
    const EmptyGraphsAllowed allowed;
    end("first");
  }
  EXPECT_EQ(heard.messages, std::vector<std::string>{"first"});
  end("second");
  EXPECT_EQ(heard.messages.size(), 3);
}

// Seed and offset that work of the capture reads.
template <class State>
std::pair<const void*, const void*> read_by(const State& state, c10::CaptureId_t capture) {
  if constexpr (requires { state.capturing_; }) {
    EXPECT_TRUE(state.capturing_);
    EXPECT_EQ(state.offset_intragraph_, 0U);
    return {state.seed_extragraph_.const_data_ptr(), state.offset_extragraph_.const_data_ptr()};
  } else {
    const auto& of_capture = *state.capture_states_.at(capture);
    EXPECT_EQ(of_capture.offset_intragraph_, 0U);
    return {of_capture.rng_state_seed_extragraph_.const_data_ptr(),
            of_capture.rng_state_offset_extragraph_.const_data_ptr()};
  }
}

// Torch's generator tells what it holds to who has a GPU.
template <auto kMember>
struct Opened {
  friend auto state_member() { return kMember; }
};
auto state_member();
template struct Opened<&at::CUDAGeneratorImpl::state_>;

TEST(CudaDraws, BeginElsewhereAndLeaveTheGeneratorWhereItWas) {
  at::CUDAGeneratorImpl generator(0, c10::make_intrusive<at::CUDAGeneratorState>(3, 8));
  const auto state = [&] { return generator.*state_member(); };
  const auto before = state();
  try {
    const CudaDraws draws(generator, {40, 44}, at::TensorBase(), std::nullopt);
    EXPECT_EQ(state()->seed_, 40U);
    EXPECT_EQ(state()->philox_offset_per_thread_, 44U);
    state()->philox_offset_per_thread_ += 4;  // a draw
    throw std::runtime_error("the kernel was not launched");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(state(), before);
  EXPECT_EQ(before->seed_, 3U);
  EXPECT_EQ(before->philox_offset_per_thread_, 8U);
}

TEST(CudaDraws, AreLaunchedFromTheirSeedAndOffset) {
  const auto state = state_of({40, 44}, at::TensorBase(), std::nullopt);
  EXPECT_EQ(state->seed_, 40U);
  EXPECT_EQ(state->philox_offset_per_thread_, 44U);
}

TEST(CudaDraws, AreCapturedFromWhatATensorHolds) {
  std::array<int64_t, 2> numbers{12, 16};
  const int64_t* words = numbers.data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), sizeof numbers,
                       c10::DataPtr(numbers.data(), c10::Device(c10::kCPU)), nullptr, false);
  const at::TensorBase philox(c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<int64_t>()));
  philox.unsafeGetTensorImpl()->set_sizes_contiguous({2});
  const auto state = state_of({40, 44}, philox, 7);
  const auto [seed, offset] = read_by(*state, 7);
  EXPECT_EQ(seed, words);
  EXPECT_EQ(offset, words + 1);
}

}  // namespace
}  // namespace acc::runtime
