#pragma once

#include <cstdint>
#include <vector>

namespace acc::passes {

// Puts each of several things on one of two sides at the lowest cost, where a thing has a price on
// either side and pairs have a price for being apart. Exact, by maximum flow; prices are not
// negative.
class MinCut {
 public:
  static constexpr int64_t kNever = int64_t{1} << 60;

  explicit MinCut(uint32_t things);

  // What it costs to have `thing` on the left (right) side.
  void price_left(uint32_t thing, int64_t price) { add(thing, right_, price, 0); }
  void price_right(uint32_t thing, int64_t price) { add(left_, thing, price, 0); }
  void price_apart(uint32_t one, uint32_t other, int64_t price) { add(one, other, price, price); }
  // `thing` may be on the right only if `needs` is.
  void require(uint32_t thing, uint32_t needs) { add(needs, thing, kNever, 0); }

  // Per thing, whether it is on the right. Of several cheapest solutions the one with the fewest
  // there.
  std::vector<bool> run();

 private:
  struct Edge {
    uint32_t to;
    int64_t room;  // what can still flow
  };

  void add(uint32_t from, uint32_t to, int64_t forth, int64_t back);
  bool find_levels();
  // Sends as much as one more shortest path takes. A loop: graphs are deeper than stacks.
  bool push();

  const uint32_t left_;
  const uint32_t right_;
  std::vector<Edge> edges_;                    // each is followed or preceded by its reverse
  std::vector<std::vector<uint32_t>> leaves_;  // per thing, and the two sides: edges
  std::vector<uint32_t> levels_;               // distance from the left side
  std::vector<uint32_t> next_;                 // the edge to try next
  std::vector<uint32_t> path_;                 // edges from the left on
};

}  // namespace acc::passes
