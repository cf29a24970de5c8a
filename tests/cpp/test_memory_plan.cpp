#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "lazy/plan/memory.h"

namespace acc::plan {
namespace {

using Lifetimes = std::vector<Lifetime>;

// Replays the lifetimes step by step on the layout, with the live ranges in the order of their
// offsets. Returns what is wrong, "" if nothing is. Written without looking at how the
// planner works: it shares no code with it.
std::string replay(const Lifetimes& lifetimes, const Layout& layout) {
  if (layout.offsets.size() != lifetimes.size()) return "wrong number of offsets";
  std::map<uint32_t, std::vector<size_t>> starts;
  std::map<uint32_t, std::vector<size_t>> ends;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    const Lifetime& lifetime = lifetimes[i];
    const std::string who = "lifetime " + std::to_string(i);
    if (layout.offsets[i] % kArenaAlignment != 0) return who + " is not aligned";
    if (layout.offsets[i] + lifetime.bytes > layout.bytes) return who + " ends after the arena";
    if (lifetime.bytes == 0) continue;
    starts[lifetime.first].push_back(i);
    ends[lifetime.last].push_back(i);
  }
  if (layout.bytes % kArenaAlignment != 0) return "the size of the arena is not aligned";

  struct Live {
    uint64_t end;
    size_t index;
  };
  std::map<uint64_t, Live> live;
  std::map<uint32_t, bool> steps;
  for (const auto& [step, who] : starts) steps[step] = true;
  for (const auto& [step, who] : ends) steps[step] = true;
  for (const auto& [step, unused] : steps) {
    for (const size_t i : starts[step]) {
      const uint64_t begin = layout.offsets[i];
      const uint64_t end = begin + lifetimes[i].bytes;
      const auto next = live.lower_bound(begin);
      const auto clash = [&](const Live& other) {
        return "lifetimes " + std::to_string(i) + " and " + std::to_string(other.index) +
               " overlap at step " + std::to_string(step);
      };
      if (next != live.end() && next->first < end) return clash(next->second);
      if (next != live.begin() && std::prev(next)->second.end > begin) {
        return clash(std::prev(next)->second);
      }
      live[begin] = {end, i};
    }
    for (const size_t i : ends[step]) live.erase(layout.offsets[i]);
  }
  return "";
}

double ratio_to_bound(const Lifetimes& lifetimes) {
  const uint64_t bound = peak_live_bytes(lifetimes);
  return static_cast<double>(plan_memory(lifetimes).bytes) /
         static_cast<double>(std::max<uint64_t>(bound, 1));
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Both ends included.
  uint64_t between(uint64_t low, uint64_t high) { return low + engine_() % (high - low + 1); }
  uint32_t step(uint64_t low, uint64_t high) { return static_cast<uint32_t>(between(low, high)); }

 private:
  std::mt19937_64 engine_;
};

struct Shape {
  const char* name;
  Lifetime (*make)(Random&, uint32_t steps);
};

// Any two steps, any size.
Lifetime uniform(Random& random, uint32_t steps) {
  const uint32_t a = random.step(0, steps);
  const uint32_t b = random.step(0, steps);
  return {random.between(0, 1 << 20), std::min(a, b), std::max(a, b)};
}

// Temporaries of operators.
Lifetime brief(Random& random, uint32_t steps) {
  const uint32_t first = random.step(0, steps);
  return {random.between(1, 1 << 20), first, first + random.step(0, 20)};
}

// Sizes of very different magnitude, a few of them long-lived.
Lifetime heavy_tail(Random& random, uint32_t steps) {
  const uint32_t first = random.step(0, steps);
  const uint64_t length = random.between(0, 9) != 0 ? 8 : steps / 4;
  return {uint64_t{1} << random.between(4, 26), first, first + random.step(0, length)};
}

// Activations kept from forward to backward, temporaries between them.
Lifetime training(Random& random, uint32_t steps) {
  if (random.between(0, 1) == 0) {
    const uint32_t first = random.step(0, steps / 2);
    return {random.between(1, 64) << 14, first, steps - first};
  }
  const uint32_t first = random.step(0, steps);
  return {random.between(1, 64) << 14, first, first + random.step(1, 4)};
}

constexpr Shape kShapes[] = {
    {"uniform", uniform}, {"brief", brief}, {"heavy tail", heavy_tail}, {"training", training}};

Lifetimes make(const Shape& shape, size_t n, uint64_t seed) {
  Random random(seed);
  Lifetimes lifetimes(n);
  for (Lifetime& lifetime : lifetimes) lifetime = shape.make(random, static_cast<uint32_t>(n));
  return lifetimes;
}

TEST(MemoryPlan, OfNothingIsEmpty) {
  const Layout layout = plan_memory({});
  EXPECT_TRUE(layout.offsets.empty());
  EXPECT_EQ(layout.bytes, 0u);
  EXPECT_EQ(peak_live_bytes({}), 0u);
}

TEST(MemoryPlan, RangesLiveTogetherAreSideBySide) {
  const Lifetimes lifetimes = {{100, 0, 1}, {256, 1, 2}};
  const Layout layout = plan_memory(lifetimes);
  EXPECT_EQ(replay(lifetimes, layout), "");
  EXPECT_EQ(layout.bytes, 512u);
}

// Steps are inclusive: a step that reads one buffer and writes the other needs both.
TEST(MemoryPlan, RangesThatShareOnlyOneStepAreLiveTogether) {
  const Lifetimes lifetimes = {{256, 0, 5}, {256, 5, 9}};
  EXPECT_EQ(plan_memory(lifetimes).bytes, 512u);
}

TEST(MemoryPlan, RangesOneAfterTheOtherShareMemory) {
  const Lifetimes lifetimes = {{1000, 0, 4}, {1024, 5, 9}, {1, 10, 10}};
  const Layout layout = plan_memory(lifetimes);
  EXPECT_EQ(layout.offsets, (std::vector<uint64_t>{0, 0, 0}));
  EXPECT_EQ(layout.bytes, 1024u);
}

TEST(MemoryPlan, EmptyBuffersTakeNoRoom) {
  const Lifetimes lifetimes = {{0, 0, 9}, {300, 0, 9}, {0, 3, 3}};
  const Layout layout = plan_memory(lifetimes);
  EXPECT_EQ(layout.offsets, (std::vector<uint64_t>{0, 0, 0}));
  EXPECT_EQ(layout.bytes, 512u);
}

TEST(MemoryPlan, StepsAndSizesMayBeAsLargeAsTheirTypes) {
  constexpr uint32_t kEnd = ~uint32_t{0};
  const Lifetimes lifetimes = {{uint64_t{1} << 61, 0, kEnd},
                               {uint64_t{1} << 60, 0, kEnd - 1},
                               {uint64_t{1} << 59, kEnd, kEnd},
                               {1, kEnd, kEnd}};
  const Layout layout = plan_memory(lifetimes);
  EXPECT_EQ(replay(lifetimes, layout), "");
  EXPECT_EQ(layout.bytes, (uint64_t{1} << 61) + (uint64_t{1} << 60));
}

TEST(MemoryPlan, BadLifetimesAreErrorsThatNameThem) {
  const auto message = [](const Lifetimes& lifetimes) -> std::string {
    try {
      plan_memory(lifetimes);
    } catch (const base::Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message({{1, 0, 0}, {1, 7, 6}}).find("lifetime 1 ends at step 6 before"),
            std::string::npos);
  EXPECT_NE(message({{~uint64_t{0}, 0, 0}}).find("18446744073709551615 bytes"), std::string::npos);
  EXPECT_NE(
      message({{uint64_t{1} << 61, 0, 0}, {(uint64_t{1} << 61) + 1, 1, 1}}).find("lifetime 1 of"),
      std::string::npos);
}

// The test of the test: a layout that is wrong is found.
TEST(MemoryPlan, TheReplayFindsWrongLayouts) {
  const Lifetimes lifetimes = {{512, 0, 2}, {256, 1, 3}, {256, 3, 3}};
  EXPECT_EQ(replay(lifetimes, {{0, 512, 0}, 768}), "");
  EXPECT_EQ(replay(lifetimes, {{0, 256, 0}, 768}), "lifetimes 1 and 0 overlap at step 1");
  EXPECT_EQ(replay(lifetimes, {{256, 0, 0}, 768}), "lifetimes 2 and 1 overlap at step 3");
  EXPECT_EQ(replay(lifetimes, {{0, 512, 128}, 768}), "lifetime 2 is not aligned");
  EXPECT_EQ(replay(lifetimes, {{0, 512, 0}, 512}), "lifetime 1 ends after the arena");
  EXPECT_EQ(replay(lifetimes, {{0, 512, 0}, 800}), "the size of the arena is not aligned");
  EXPECT_EQ(replay(lifetimes, {{0}, 768}), "wrong number of offsets");
}

TEST(MemoryPlan, NoTwoLiveRangesOverlapInAnyRandomTrace) {
  for (const Shape& shape : kShapes) {
    for (uint64_t seed = 0; seed < 150; ++seed) {
      const size_t n = 1 + seed * seed % 400;
      const Lifetimes lifetimes = make(shape, n, seed);
      const Layout layout = plan_memory(lifetimes);
      ASSERT_EQ(replay(lifetimes, layout), "") << shape.name << ", seed " << seed;
      ASSERT_GE(layout.bytes, peak_live_bytes(lifetimes)) << shape.name << ", seed " << seed;
    }
  }
}

// Few steps and few sizes: many equal heights, many ranges over the same steps.
TEST(MemoryPlan, NoTwoLiveRangesOverlapInCrowdedTraces) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const uint64_t steps = random.between(1, 8);
    Lifetimes lifetimes(random.between(1, 60));
    for (Lifetime& lifetime : lifetimes) {
      const uint32_t a = random.step(1, steps);
      const uint32_t b = random.step(1, steps);
      lifetime = {random.between(0, 4) * 200, std::min(a, b), std::max(a, b)};
    }
    ASSERT_EQ(replay(lifetimes, plan_memory(lifetimes)), "") << "seed " << seed;
  }
}

// What is asked of numbers is asked of all of them without the sanitizer.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kLarge = 2'500;
constexpr std::array<size_t, 2> kSizes = {30, 300};
#else
constexpr size_t kLarge = 20'000;
constexpr std::array<size_t, 4> kSizes = {30, 300, 2000, 5000};
#endif

TEST(MemoryPlan, NoTwoLiveRangesOverlapInALargeTrace) {
  for (const Shape& shape : kShapes) {
    const Lifetimes lifetimes = make(shape, kLarge, 5);
    EXPECT_EQ(replay(lifetimes, plan_memory(lifetimes)), "") << shape.name;
  }
}

TEST(MemoryPlan, TheBoundIsTheMostThatIsLiveAtOneStep) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Lifetimes lifetimes = make(kShapes[seed % 4], 60, seed);
    uint64_t most = 0;
    for (uint32_t step = 0; step < 120; ++step) {
      uint64_t live = 0;
      for (const Lifetime& each : lifetimes) {
        if (each.first <= step && step <= each.last) live += (each.bytes + 255) / 256 * 256;
      }
      most = std::max(most, live);
    }
    EXPECT_EQ(peak_live_bytes(lifetimes), most) << "seed " << seed;
  }
}

TEST(MemoryPlan, IsWithinTenPercentOfTheBoundInMostTraces) {
  for (const Shape& shape : kShapes) {
    for (const size_t n : kSizes) {
      std::vector<double> ratios;
      for (uint64_t seed = 0; seed < 20; ++seed)
        ratios.push_back(ratio_to_bound(make(shape, n, seed)));
      std::sort(ratios.begin(), ratios.end());
      EXPECT_LE(ratios[17], 1.10) << shape.name << ", " << n << " lifetimes, nine of ten";
      EXPECT_LE(ratios[10], 1.06) << shape.name << ", " << n << " lifetimes, median";
      EXPECT_LE(ratios.back(), 1.20) << shape.name << ", " << n << " lifetimes, worst";
    }
  }
}

// A chain of equal operators is what most of a model is; it has to be exact.
TEST(MemoryPlan, MeetsTheBoundOnAChainAndOnAForwardBackwardPass) {
  Lifetimes chain;
  for (uint32_t i = 0; i < 500; ++i) chain.push_back({4096, i, i + 1});
  EXPECT_EQ(ratio_to_bound(chain), 1.0);

  Lifetimes pass;
  for (uint32_t i = 0; i < 500; ++i) {
    pass.push_back({uint64_t{256} * (1 + i * 7 % 64), i, 1000 - i});
    pass.push_back({uint64_t{256} * (1 + i * 5 % 64), i, i + 1});
    pass.push_back({uint64_t{256} * (1 + i * 3 % 64), 1000 - i, 1001 - i});
  }
  EXPECT_LE(ratio_to_bound(pass), 1.01);
}

// Ranks must agree on alignment classes, and a plan must be the same in the next process.
TEST(MemoryPlan, IsDeterministic) {
  for (const Shape& shape : kShapes) {
    const Lifetimes lifetimes = make(shape, 1000, 3);
    const Layout once = plan_memory(lifetimes);
    const Layout again = plan_memory(lifetimes);
    EXPECT_EQ(once.offsets, again.offsets) << shape.name;
    EXPECT_EQ(once.bytes, again.bytes) << shape.name;
  }
  // On every machine: the sum of all offsets of one trace, as first computed.
  const std::vector<uint64_t> offsets = plan_memory(make(kShapes[0], 1000, 3)).offsets;
  EXPECT_EQ(std::accumulate(offsets.begin(), offsets.end(), uint64_t{0}), 115846808576u);
}

// For eight times the lifetimes n log n is 10 times as much, twice that if only the many need a
// second packing, and n^2 is 64 times. Comparisons of pairs, of which few have some, are no visits.
TEST(MemoryPlan, TakesNLogNTime) {
  for (const Shape& shape : kShapes) {
    const uint64_t few = plan_memory(make(shape, kLarge / 8, 1)).visits;
    const uint64_t many = plan_memory(make(shape, kLarge, 1)).visits;
    EXPECT_GE(few, kLarge / 8) << shape.name;
    EXPECT_LT(many, 24 * few) << shape.name << ": " << few << ", " << many;
  }
}

}  // namespace
}  // namespace acc::plan
