#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>

#include "csrc/base/hash.h"
#include "lazy/graph/print.h"
#include "lazy/passes/dce.h"
#include "lazy/plan/plan.h"
#include "lazy/plan/print.h"
#include "tests/cpp/elementwise_builder.h"

namespace acc {
namespace {

using plan::Place;
using testing::GraphBuilder;

std::vector<bool> alive(const graph::Graph& graph, std::initializer_list<uint32_t> buffers) {
  std::vector<bool> result(graph.buffers.size());
  for (const uint32_t buffer : buffers) result[buffer] = true;
  return result;
}

TEST(Dce, WhatNobodyCanReachVanishes) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t dead = b.fresh();
  const uint32_t kept = b.fresh();
  b.call("relu", {{x}}, {{dead}});
  b.call("tanh", {{x}}, {{kept}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {kept})),
            (std::vector<bool>{false, true}));
}

TEST(Dce, TheTextBeforeAndAfter) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t dead = b.fresh();
  const uint32_t dead_too = b.fresh();
  const uint32_t kept = b.fresh();
  b.call("relu", {{x}}, {{dead}});
  b.call("tanh", {{dead}}, {{dead_too}});
  b.in_place("add_", {{x}}, {{x}});
  b.call("exp", {{x}}, {{kept}});
  EXPECT_EQ(graph::print(b.graph),
            "%1:f32[4] = relu(%0:f32[4])\n"
            "%2:f32[4] = tanh(%1:f32[4])\n"
            "add_(%0:f32[4], %0:f32[4])\n"
            "%3:f32[4] = exp(%0:f32[4])\n");
  EXPECT_EQ(plan::print(b.graph, passes::eliminate_dead_code(b.graph, alive(b.graph, {kept}))),
            "add_(%0:f32[4], %0:f32[4])\n"
            "%3:f32[4] = exp(%0:f32[4])\n");
}

TEST(Dce, AChainIsKeptFromItsEnd) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("relu", {{x}}, {{y}});
  b.call("tanh", {{y}}, {{z}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {z})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AWriteToAnInputStaysAlthoughItsResultIsDropped) {
  // Batch norm's running statistics in a forward whose output nobody reads.
  GraphBuilder b;
  const uint32_t statistics = b.input();
  const uint32_t x = b.input();
  b.in_place("update", {{statistics}}, {{x}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {})), (std::vector<bool>{true}));
}

TEST(Dce, AWriteThroughAViewKeepsWhatIsReadThroughTheStorage) {
  // w = x.view(...); w.add_(y); w is gone; x is still there.
  GraphBuilder b;
  const uint32_t x = b.fresh(32);
  const uint32_t y = b.input();
  b.call("relu", {{y, 8}}, {{x, 8}});
  b.in_place("add_", {{x, 4, 4}}, {{y}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {x})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AWriteThroughOneInputViewIsReadThroughAnother) {
  GraphBuilder b;
  const uint32_t whole = b.input();
  const uint32_t tail = b.input_view(whole, 8);
  const uint32_t out = b.fresh();
  b.in_place("zero_", {{tail, 2}});
  b.call("relu", {{whole}}, {{out}});
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {out})),
            (std::vector<bool>{true, true}));
}

TEST(Dce, AnOperatorThatMustRunRuns) {
  GraphBuilder b;
  const uint32_t x = b.input();
  b.call("_assert_async", {{x}}, {});
  b.last_op().removable = false;
  EXPECT_EQ(passes::eliminate_dead_code(b.graph, alive(b.graph, {})), (std::vector<bool>{true}));
}

TEST(Build, ResultsOfOperatorsWithoutAnOutKernelAreAdoptedAndReleasedAfterTheirLastUse) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  const uint32_t z = b.fresh();
  b.call("convolution", {{x}}, {{y}});
  b.call("batch_norm", {{y}}, {{z}});
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kAdopted);
  EXPECT_EQ(plan->unfused.steps[0].release, (std::vector<uint32_t>{x}));
  EXPECT_EQ(plan->unfused.steps[1].release, (std::vector<uint32_t>{y}));
}

TEST(Build, IntermediatesWithAnOutKernelLiveInTheArenaAndOutputsOnTheirOwn) {
  static const int kKernel = 0;
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(64);
  const uint32_t z = b.fresh(64);
  b.call("relu", {{x, 16}}, {{y, 16}});
  b.last_op().out_handle = &kKernel;
  b.call("tanh", {{y, 16}}, {{z, 16}});
  b.last_op().out_handle = &kKernel;
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kArena);
  EXPECT_EQ(plan->unfused.places[z], Place::kAllocated);
  EXPECT_EQ(plan->unfused.steps[1].allocate, (std::vector<uint32_t>{z}));
  EXPECT_EQ(plan->unfused.arena_bytes, 256U);
}

TEST(Build, ALargeIntermediateHasABlockOfItsOwnUntilItsLastUse) {
  static const int kKernel = 0;
  constexpr int64_t kElements = 1 << 20;
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh(4 * kElements);
  const uint32_t z = b.fresh();
  b.call("expand", {{x}}, {{y, kElements}});
  b.last_op().out_handle = &kKernel;
  b.call("sum", {{y, kElements}}, {{z}});
  b.last_op().out_handle = &kKernel;
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {z}), {.fuse = false});
  EXPECT_EQ(plan->unfused.places[y], Place::kAllocated);
  EXPECT_EQ(plan->unfused.steps[0].allocate, (std::vector<uint32_t>{y}));
  EXPECT_EQ(plan->unfused.steps[1].release, (std::vector<uint32_t>{y}));
  EXPECT_EQ(plan->unfused.arena_bytes, 0U);
}

TEST(Build, ABufferThatNoRemainingStepTouchesIsNowhere) {
  GraphBuilder b;
  const uint32_t x = b.input();
  const uint32_t y = b.fresh();
  b.call("relu", {{x}}, {{y}});
  const auto plan = plan::build(b.graph, {}, alive(b.graph, {}), {.fuse = false});
  EXPECT_TRUE(plan->unfused.steps.empty());
  EXPECT_EQ(plan->unfused.places[y], Place::kNowhere);
}

// Runs a plan on pretended memory: what a node reads must be what it would read in program order.
class Pretended {
 public:
  explicit Pretended(const plan::Plan& plan, const plan::Schedule& schedule)
      : plan_(plan), schedule_(schedule), block_(plan.program.buffers.size(), kNone) {
    // In program order, each buffer is its own memory.
    std::map<uint32_t, uint64_t> values;
    for (uint32_t node = 0; node < plan.program.nodes.size(); ++node) {
      read_.push_back(reads(node, [&](uint32_t buffer) { return values[buffer]; }));
      for (const uint32_t buffer : written(node)) values[buffer] = made(node, buffer);
    }
    last_ = values;
  }

  void run() {
    for (const plan::Step& step : schedule_.steps) {
      for (const uint32_t buffer : step.allocate) {
        ASSERT_EQ(block_[buffer], kNone);
        block_[buffer] = blocks_++;
      }
      check_launches(step);
      check_arena(step);
      if (::testing::Test::HasFatalFailure()) return;
      std::map<uint32_t, uint64_t> registers;
      for (const uint32_t node : step.nodes) {
        const uint64_t found = reads(node, [&](uint32_t buffer) {
          const auto in = registers.find(buffer);
          return in != registers.end() ? in->second : load(buffer);
        });
        ASSERT_EQ(found, read_[node]) << "node " << node;
        for (const uint32_t buffer : written(node)) registers[buffer] = made(node, buffer);
      }
      for (const plan::Reuse& reuse : step.reuse) {
        ASSERT_NE(block_[reuse.of], kNone);
        block_[reuse.buffer] = block_[reuse.of];
      }
      for (const auto& [buffer, value] : registers) {
        if (is_stored(step, buffer)) store(buffer, value);
      }
      for (const uint32_t buffer : step.release) block_[buffer] = kNone;
    }
    for (uint32_t buffer = 0; buffer < plan_.outputs.size(); ++buffer) {
      if (!plan_.outputs[buffer]) continue;
      ASSERT_EQ(load(buffer), last_[buffer]) << "output " << buffer;
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  static uint64_t mix(uint64_t a, uint64_t b) {
    base::Hasher hasher;
    hasher.add(a);
    hasher.add(b);
    return hasher.finish().lo;
  }
  static uint64_t made(uint32_t node, uint32_t buffer) { return mix(node, buffer); }

  template <class Value>
  uint64_t reads(uint32_t node, const Value& value) const {
    uint64_t all = 0;
    for (const graph::Use& use : graph::uses(plan_.program, plan_.program.nodes[node])) {
      if (use.reads) all = mix(all, value(use.buffer));
    }
    return all;
  }
  std::vector<uint32_t> written(uint32_t node) const {
    std::vector<uint32_t> found;
    for (const graph::Use& use : graph::uses(plan_.program, plan_.program.nodes[node])) {
      if (use.writes || use.fresh) found.push_back(use.buffer);
    }
    return found;
  }

  // What a step touches in the arena does not overlap: kernels read and write side by side.
  void check_arena(const plan::Step& step) const {
    std::map<uint64_t, uint32_t> begins;
    for (const graph::Use& use : plan::uses(plan_, step)) {
      if (schedule_.places[use.buffer] == Place::kArena &&
          plan_.program.buffers[use.buffer].nbytes) {
        const auto [found, fresh] = begins.try_emplace(schedule_.offsets[use.buffer], use.buffer);
        ASSERT_TRUE(fresh || found->second == use.buffer);
      }
    }
    uint64_t end = 0;
    for (const auto& [begin, buffer] : begins) {
      ASSERT_GE(begin, end);
      end = begin + plan_.program.buffers[buffer].nbytes;
    }
  }

  // Launches of one step run in any order: none touches what another one writes, or writes over.
  void check_launches(const plan::Step& step) const {
    for (const passes::Launch& launch : step.launches) {
      const auto has = [&](uint32_t buffer) {
        return std::ranges::find(launch.operands, buffer, &passes::Launch::Operand::buffer) !=
               launch.operands.end();
      };
      for (const plan::Reuse& reuse : step.reuse) {
        ASSERT_TRUE(has(reuse.buffer) || !has(reuse.of));
      }
      for (const passes::Launch& other : step.launches) {
        for (const passes::Launch::Operand& operand : other.operands) {
          ASSERT_TRUE(&other == &launch || !operand.stored || !has(operand.buffer));
        }
      }
    }
  }
  static bool is_stored(const plan::Step& step, uint32_t buffer) {
    if (step.kernel == plan::kNoKernel) return true;
    return std::ranges::any_of(step.launches, [&](const passes::Launch& launch) {
      return std::ranges::any_of(launch.operands, [&](const passes::Launch::Operand& operand) {
        return operand.buffer == buffer && operand.stored;
      });
    });
  }

  void store(uint32_t buffer, uint64_t value) {
    if (schedule_.places[buffer] == Place::kArena) {
      const uint64_t begin = schedule_.offsets[buffer];
      const uint64_t end = begin + plan_.program.buffers[buffer].nbytes;
      ASSERT_LE(end, schedule_.arena_bytes);
      std::erase_if(arena_, [&](const auto& is) {
        return is.first < end && begin < is.first + plan_.program.buffers[is.second.first].nbytes;
      });
      arena_[begin] = {buffer, value};
      return;
    }
    if (block_[buffer] == kNone) {  // given, or the operator's own
      ASSERT_NE(schedule_.places[buffer], Place::kAllocated);
      block_[buffer] = blocks_++;
    }
    in_block_[block_[buffer]] = value;
  }
  uint64_t load(uint32_t buffer) const {
    if (schedule_.places[buffer] == Place::kArena) {
      const auto found = arena_.find(schedule_.offsets[buffer]);
      return found != arena_.end() && found->second.first == buffer ? found->second.second : ~0ULL;
    }
    const auto found = in_block_.find(block_[buffer]);
    return found != in_block_.end() ? found->second : 0;
  }

  const plan::Plan& plan_;
  const plan::Schedule& schedule_;
  std::vector<uint64_t> read_;  // per node
  std::map<uint32_t, uint64_t> last_;
  std::vector<uint32_t> block_;  // per buffer
  uint32_t blocks_ = 0;
  std::map<uint32_t, uint64_t> in_block_;
  std::map<uint64_t, std::pair<uint32_t, uint64_t>> arena_;  // by the first byte
};

TEST(Build, NoStepOverwritesWhatALaterStepReads) {
  static const int kKernel = 0;
  constexpr std::array<int64_t, 4> kElements = {4, 100, 20'000, 20'000};  // the last have blocks
  std::mt19937 random(20261121);
  size_t in_place = 0;
  size_t joined = 0;
  for (int round = 0; round < 1500; ++round) {
    testing::ElementwiseBuilder b;
    std::array<std::vector<uint32_t>, 4> known;
    const auto any = [&](size_t size) {
      if (known[size].empty() || random() % 12 == 0) known[size].push_back(b.input());
      return known[size][random() % known[size].size()];
    };
    const size_t nodes = 2 + random() % 40;
    for (size_t i = 0; i < nodes; ++i) {
      const size_t size = random() % 4;
      const int64_t n = kElements[size];
      const uint32_t x = any(size);
      switch (random() % 6) {
        case 0:
          known[size].push_back(b.unary("aten::exp", x, n));
          break;
        case 1:
          known[size].push_back(b.product(x, any(size), n));
          break;
        case 2:
          b.scale_in_place(x, any(size), n);
          break;
        case 3:
          known[size].push_back(b.unary("aten::neg", x, n));
          break;
        default:
          known[size].push_back(b.opaque(x, n));
          if (random() % 3 != 0) b.last_op().out_handle = &kKernel;
      }
    }
    std::vector<bool> live(b.graph.buffers.size());
    for (size_t i = 0; i < live.size(); ++i) {
      live[i] = b.graph.buffers[i].kind == graph::BufferKind::kFresh && random() % 5 == 0;
    }
    const auto plan = plan::build(b.graph, {}, live, {});
    plan::use_kernels(*plan, std::vector<bool>(plan->kernels.size(), true));
    SCOPED_TRACE(::testing::Message() << "round " << round);
    for (const plan::Schedule* schedule : {&plan->unfused, &plan->fused}) {
      if (schedule == &plan->fused && plan->kernels.empty()) continue;
      Pretended(*plan, *schedule).run();
      if (HasFatalFailure()) return;
      for (const plan::Step& step : schedule->steps) {
        in_place += step.reuse.size();
        joined += step.launches.size() > 1 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(in_place, 200U);
  EXPECT_GT(joined, 100U);
}

}  // namespace
}  // namespace acc
