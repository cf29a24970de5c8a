#pragma once

#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/codegen/cuda_launch.h"
#include "kernels/codegen/render.h"
#include "tests/cpp/scratch.h"
#include "tests/cuda_emulator/guarded.h"

// Runs the text of CUDA kernels without a GPU: compiled by the host's compiler, the threads of a
// block as fibers that stop at barriers and where a warp exchanges values or waits for its lanes.
// What would hang or fail on a GPU throws: a barrier or an exchange that not all threads reach, and
// memory that is not there.
namespace acc::testing {

namespace emulator {

// As in device.h.
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Emulated {
  Index thread, block, block_size, grid_size;
  unsigned shared = 0;
  void (*barrier)() = nullptr;
  void (*exchange)(void*, unsigned long, unsigned, int) = nullptr;
};

using Kernel = void (*)(const long* table, int calls, int stage);

constexpr size_t kStack = size_t{64} << 10;
constexpr unsigned kShared = 48U << 10;  // bytes of device.h's array
constexpr unsigned kWarp = 32;

enum class State { kReady, kBarrier, kExchange, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStack);
  Index index;
  State state = State::kReady;
  // in an exchange; a warp's barrier is one of nothing
  char value[8];
  unsigned long bytes;
  unsigned mask;
  int lane_bits;
};

// The blocks of a launch, one after the other; there is one emulation at a time.
class Blocks {
 public:
  Blocks(Kernel kernel, const long* table, int calls, int stage, Emulated* device, bool backwards)
      : kernel_(kernel),
        table_(table),
        calls_(calls),
        stage_(stage),
        device_(device),
        backwards_(backwards) {}

  void run(unsigned threads_x, unsigned threads_y) {
    // Kept from launch to launch: half a thousand stacks would be new memory each time.
    static std::vector<std::unique_ptr<Fiber>> kept;
    const Watch watch(this);
    while (kept.size() < threads_x * threads_y) kept.push_back(std::make_unique<Fiber>());
    fibers_ = std::span(kept).first(threads_x * threads_y);
    for (unsigned i = 0; i < fibers_.size(); ++i) {
      std::unique_ptr<Fiber>& fiber = fibers_[i];
      fiber->index = {i % threads_x, i / threads_x, 0};
      fiber->state = State::kReady;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = &scheduler_;
      makecontext(&fiber->context, &Blocks::begin, 0);
    }
    while (step()) {
    }
  }

  static void barrier() { running->stop(State::kBarrier); }
  static void exchange(void* value, unsigned long bytes, unsigned mask, int lane_bits) {
    Fiber& fiber = *running->fibers_[running->current_];
    memcpy(fiber.value, value, bytes);
    fiber.bytes = bytes;
    fiber.mask = mask;
    fiber.lane_bits = lane_bits;
    running->stop(State::kExchange);
    memcpy(value, running->fibers_[running->current_]->value, bytes);
  }

 private:
  // While threads run: one that touches memory which is not there ends, and the scheduler goes on.
  class Watch {
   public:
    explicit Watch(Blocks* blocks) {
      running = blocks;
      struct sigaction watching{};
      watching.sa_sigaction = &stop_at;
      watching.sa_flags = SA_SIGINFO;
      sigaction(SIGSEGV, &watching, &before);
    }
    ~Watch() {
      sigaction(SIGSEGV, &before, nullptr);
      running = nullptr;
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    static void stop_at(int, siginfo_t* info, void*) {
      if (running == nullptr) {  // of another thread, which meets it again
        sigaction(SIGSEGV, &before, nullptr);
        return;
      }
      running->fault_ = info->si_addr;
      setcontext(&running->scheduler_);
    }
    static inline struct sigaction before;
  };

  [[noreturn]] void fail(const std::string& what) const {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(kernel_), &info);
    throw std::runtime_error(std::string(info.dli_sname) + ": " + what);
  }

  static void begin() {
    Blocks& blocks = *running;
    blocks.kernel_(blocks.table_, blocks.calls_, blocks.stage_);
    blocks.fibers_[blocks.current_]->state = State::kDone;
  }

  void stop(State why) {
    Fiber& fiber = *fibers_[current_];
    fiber.state = why;
    swapcontext(&fiber.context, &scheduler_);
  }

  // Lets the threads run until they end or wait for each other, each warp as far as it comes: what
  // a barrier should have kept apart happens in the wrong order. Whether there are any left.
  bool step() {
    const size_t warps = (fibers_.size() + kWarp - 1) / kWarp;
    for (size_t i = 0; i < warps; ++i) {
      const size_t first = (backwards_ ? warps - 1 - i : i) * kWarp;
      do {
        run_warp(first);
      } while (exchange_in_warp(first));
    }
    size_t waiting = 0;
    size_t done = 0;
    for (const auto& fiber : fibers_) {
      waiting += fiber->state == State::kBarrier;
      done += fiber->state == State::kDone;
    }
    if (done == fibers_.size()) return false;
    if (waiting != fibers_.size()) {
      fail("not all threads of a block reach a barrier or an exchange");
    }
    for (const auto& fiber : fibers_) fiber->state = State::kReady;
    return true;
  }

  void run_warp(size_t first) {
    const size_t lanes = std::min<size_t>(kWarp, fibers_.size() - first);
    for (size_t lane = 0; lane < lanes; ++lane) {
      current_ = first + (backwards_ ? lanes - 1 - lane : lane);
      if (fibers_[current_]->state != State::kReady) continue;
      device_->thread = fibers_[current_]->index;
      swapcontext(&scheduler_, &fibers_[current_]->context);
      if (fault_) fail("a thread touches " + Guarded::place_of(*fault_));
    }
  }

  // Whether the lanes of a warp that are named in the exchange wait for it, and now have it.
  bool exchange_in_warp(size_t first) {
    const auto lanes = static_cast<unsigned>(std::min<size_t>(kWarp, fibers_.size() - first));
    unsigned waiting = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      waiting |= static_cast<unsigned>(fibers_[first + lane]->state == State::kExchange) << lane;
    }
    if (waiting == 0) return false;
    char values[kWarp][sizeof(Fiber::value)];
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const Fiber& fiber = *fibers_[first + lane];
      memcpy(values[lane], fiber.value, sizeof fiber.value);
      if (fiber.state == State::kExchange && (fiber.mask & waiting) != fiber.mask) return false;
    }
    for (unsigned lane = 0; lane < lanes; ++lane) {
      Fiber& fiber = *fibers_[first + lane];
      if (fiber.state != State::kExchange) continue;
      const unsigned from = lane ^ static_cast<unsigned>(fiber.lane_bits);
      if ((fiber.mask >> lane & 1) == 0 || (fiber.mask >> from & 1) == 0) {
        fail("a lane takes part in an exchange whose mask leaves it out");
      }
      for (unsigned rest = fiber.mask; rest != 0; rest &= rest - 1) {
        const Fiber& other = *fibers_[first + static_cast<unsigned>(std::countr_zero(rest))];
        if (fiber.bytes != other.bytes || fiber.mask != other.mask) {
          fail("the lanes of a warp wait for each other in different places");
        }
      }
      memcpy(fiber.value, values[from], fiber.bytes);
      fiber.state = State::kReady;
    }
    return true;
  }

  static inline thread_local Blocks* running = nullptr;

  const Kernel kernel_;
  const long* const table_;
  const int calls_;
  const int stage_;
  Emulated* const device_;
  const bool backwards_;
  std::span<std::unique_ptr<Fiber>> fibers_;
  ucontext_t scheduler_;
  size_t current_ = 0;
  std::optional<const void*> fault_;  // what a thread touched and may not
};

// One launch, which may ask for more of a block's memory than there is. That memory, `shared`, is
// filled before each block; behind what the launch asked for it is to stay as it is.
inline void run(Kernel kernel, Emulated* device, long* shared, const codegen::CudaLaunch& launch,
                const long* table, int calls, int stage, bool backwards) {
  device->block_size = {launch.x, launch.y, 1};
  device->grid_size = {launch.blocks, 1, 1};
  device->shared = std::min(launch.shared, kShared);
  device->barrier = &Blocks::barrier;
  device->exchange = &Blocks::exchange;
  static const std::vector<char> filled(kShared, char(0xff));
  Blocks blocks(kernel, table, calls, stage, device, backwards);
  for (unsigned i = 0; i < launch.blocks; ++i) {
    memcpy(shared, filled.data(), kShared);
    device->block = {backwards ? launch.blocks - 1 - i : i, 0, 0};
    blocks.run(launch.x, launch.y);
    const char* const behind = reinterpret_cast<const char*>(shared) + device->shared;
    if (memcmp(behind, filled.data(), kShared - device->shared) != 0) {
      throw std::runtime_error("a block writes behind the memory that it has");
    }
  }
}

}  // namespace emulator

// Kernels, compiled together.
class EmulatedKernels {
 public:
  explicit EmulatedKernels(const std::vector<codegen::KernelText>& kernels,
                           const std::string& preamble = codegen::cuda_preamble()) {
    const std::string source = folder_ / "kernels.cpp";
    const std::string library = folder_ / "kernels.so";
    std::ofstream file(source);
    file << "#include \"tests/cuda_emulator/device.h\"\n" << preamble;
    for (const codegen::KernelText& kernel : kernels) file << kernel.text;
    file.close();
    const Output made = shell(
        "g++ -std=c++17 -O0 -shared -fPIC -ffp-contract=off -fvisibility=hidden -Wall"
        " -Wno-unknown-pragmas -Wno-unused -nostdinc++ -I . -o " +
        library + " " + source);
    if (made.status != 0) throw std::runtime_error(made.text);
    library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~EmulatedKernels() { dlclose(library_); }
  EmulatedKernels(const EmulatedKernels&) = delete;
  EmulatedKernels& operator=(const EmulatedKernels&) = delete;

  // `table`: see kernels/codegen/render.h. `backwards`: threads run in the other order.
  void run(const std::string& name, const codegen::CudaLaunch& launch, const long* table, int calls,
           int stage, bool backwards = false) const {
    const auto kernel = reinterpret_cast<emulator::Kernel>(dlsym(library_, name.c_str()));
    const auto of = reinterpret_cast<emulator::Emulated* (*)()>(dlsym(library_, "acc_emulated"));
    if (kernel == nullptr) throw std::runtime_error("no kernel " + name);
    const auto shared = reinterpret_cast<long* (*)()>(dlsym(library_, "acc_shared"));
    emulator::run(kernel, of(), shared(), launch, table, calls, stage, backwards);
  }

 private:
  ScratchFolder folder_;
  void* library_ = nullptr;
};

}  // namespace acc::testing
