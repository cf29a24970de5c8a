#include "lazy/passes/fuse.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "lazy/graph/edges.h"
#include "lazy/passes/elementwise.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::kNobody;

// Accesses per cluster, counted once per node that makes them. A kernel of more has its pointers
// and values in memory rather than in registers, and the compiler's time grows faster than the
// kernel: 38 operators, half of them tanh, took g++ 1.9 s.
constexpr size_t kMaxAccesses = 96;
// Where columns are added up a thread also holds what has been added so far, for each sum. On a GPU
// eight gradients of a tanh, copied and added up in one kernel (80 accesses, 33 pointers), left 184
// bytes of a thread in memory on sm_86 and 472 on sm_100, six of them 240 there. Four and four
// leave none, and 40 on sm_120.
constexpr size_t kMaxColumnAccesses = 48;

// Numbers drawn for each element: a thread holds a block of Philox's words for each. Five dropouts
// of one tensor and a uniform number leave nothing of a thread in memory; with two more it was 32
// bytes on sm_90, with five 160, and 224 where the uniform number had bounds.
constexpr size_t kMaxDraws = 6;

// Elements of one reduction that is done by one thread: the sum of a larger tensor is ATen's.
constexpr int64_t kMaxReduced = int64_t{1} << 20;

// Elements of a copy between layouts, below which it takes less than the call of an operator.
constexpr int64_t kMinTransposed = 4096;

// More loops than these do not occur in programs; each costs every row an addition per operand.
constexpr size_t kMaxLoops = 6;

struct Open : Cluster {
  uint64_t ambient = 0;
  int64_t elements = 0;
  std::vector<bool> writes;  // per access
  uint32_t low = 0;          // the first and the last node
  uint32_t high = 0;
  size_t draws = 0;
  bool again = false;  // all of it computes values once more
};

// What makes it worth to join two clusters: memory that one writes and the other touches (vertical
// fusion), or that both read (horizontal fusion).
enum class Shared : uint8_t { kWritten, kRead };

class Fusion {
 public:
  Fusion(const Graph& graph, bool in_parts)
      : graph_(graph),
        in_parts_(in_parts),
        before_(graph::predecessors(graph)),
        owner_(graph.nodes.size()) {
    std::iota(owner_.begin(), owner_.end(), 0U);
    find_uses();
    others_before_.assign(graph.nodes.size() + 1, 0);
    for (uint32_t i = 0; i < graph.nodes.size(); ++i) {
      open_.push_back(single(i));
      others_before_[i + 1] = others_before_[i] + (open_[i].elementwise() ? 0 : 1);
    }
    order_.resize(open_.size());
    std::iota(order_.begin(), order_.end(), 0U);
    position_ = order_;
    marks_.assign(open_.size(), 0);
  }

  std::vector<Cluster> run() {
    for (uint32_t node = 0; node < open_.size(); ++node) {
      if (!open_[node].elementwise()) continue;
      // The latest first: what is nearest is most likely to have the same loops.
      for (size_t i = before_[node].size(); i-- > 0;) {
        const uint32_t a = owner_[before_[node][i]];
        const uint32_t b = owner_[node];
        if (a != b && open_[a].elementwise()) join(a, b, Shared::kWritten);
      }
    }
    join_readers();
    return in_order();
  }

 private:
  // Joins what reads the same elements, so that they are read once, where nothing runs between. Not
  // reductions: they read theirs again, and two of them have more than the cache holds (two batch
  // norms behind one ReLU: 5 % of a ResNet-18's step).
  void join_readers() {
    std::vector<uint32_t> reader(graph_.buffers.size(), kNobody);  // per storage: the last so far
    for (uint32_t node = 0; node < open_.size(); ++node) {
      if (!open_[owner_[node]].elementwise()) continue;
      for (const graph::Use& use : graph::uses(graph_, graph_.nodes[node])) {
        if (!use.reads) continue;
        uint32_t& last = reader[graph_.buffers[use.buffer].group];
        const uint32_t a = last == kNobody ? kNobody : owner_[last];
        const uint32_t b = owner_[node];
        last = node;
        if (a == kNobody || a == b) continue;
        if (open_[a].nest.reduces() || open_[b].nest.reduces()) continue;
        if (is_apart(open_[a], open_[b])) continue;
        join(a, b, Shared::kRead);
      }
    }
  }

  // Whether something that is not elementwise stands between the end of one cluster and the begin
  // of the other.
  bool is_apart(const Open& a, const Open& b) const {
    const Open& early = a.high < b.low ? a : b;
    const Open& late = a.high < b.low ? b : a;
    return early.high < late.low && others_before_[late.low] != others_before_[early.high + 1];
  }

  void find_uses() {
    first_use_.assign(graph_.buffers.size(), std::numeric_limits<uint32_t>::max());
    last_use_.assign(graph_.buffers.size(), 0);
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      for (const graph::Use& use : graph::uses(graph_, graph_.nodes[i])) {
        const uint32_t group = graph_.buffers[use.buffer].group;
        first_use_[group] = std::min(first_use_[group], i);
        last_use_[group] = i;
      }
    }
  }

  Open single(uint32_t index) const {
    const graph::Node& node = graph_.nodes[index];
    Open made;
    made.nodes = {index};
    made.first = {0};
    made.ambient = node.ambient;
    made.low = made.high = index;
    made.again = node.again;
    auto found = as_elementwise(graph_, node);
    if (!found.has_value()) return made;
    Nest& nest = found->nest;
    sort_loops(nest, Access(widest(nest)));
    coalesce(nest);
    if (nest.sizes.size() > kMaxLoops || transposes(*found)) return made;
    made.writes.assign(nest.accesses.size(), false);
    for (const Elementwise::Result& result : found->results) made.writes[result.access] = true;
    made.elements = product(nest.sizes);
    if (!in_parts_ && made.elements / nest.kept_elements() > kMaxReduced) return made;
    // A call that reads what it writes element by element, and nothing else of it.
    if (clash(nest, made.writes, nest, made.writes)) return made;
    made.nest = std::move(nest);
    made.draws = static_cast<size_t>(std::ranges::count_if(
        found->formula->terms, [](const graph::Term& term) { return graph::is_draw(term.fn); }));
    return made;
  }

  // Whether it only copies, and neighbours of what it reads are none of what it writes. No order of
  // loops suits both, nor what is fused with it: images [16, 3, 64, 64] made channels last and
  // added to took one kernel 0.93 ms, ATen's copy and a kernel 0.10.
  static bool transposes(const Elementwise& node) {
    const Nest& nest = node.nest;
    if (nest.accesses.size() != 2 || product(nest.sizes) < kMinTransposed) return false;
    const auto computes = [](const graph::Term& term) { return term.fn != graph::Fn::kArgument; };
    if (std::ranges::any_of(node.formula->terms, computes)) return false;
    const std::vector<int64_t>& one = nest.accesses[0].strides;
    const std::vector<int64_t>& other = nest.accesses[1].strides;
    bool shared = false;
    for (size_t i = 0; i < nest.sizes.size(); ++i) shared |= one[i] == 1 && other[i] == 1;
    const auto has_neighbours = [](const auto& strides) {
      return std::ranges::find(strides, 1) != strides.end();
    };
    return !shared && has_neighbours(one) && has_neighbours(other);
  }

  static int moving_loops(const Access& access) {
    return static_cast<int>(
        std::ranges::count_if(access.strides, [](int64_t s) { return s != 0; }));
  }

  static bool moves_always(const Access& access) {
    return static_cast<size_t>(moving_loops(access)) == access.strides.size();
  }

  // The access that moves with the most loops; the last of those.
  static const Access& widest(const Nest& nest) {
    const Access* found = &nest.accesses.back();
    for (size_t i = nest.accesses.size(); i-- > 0;) {
      if (moving_loops(nest.accesses[i]) > moving_loops(*found)) found = &nest.accesses[i];
    }
    return *found;
  }

  // Whether neighbours are kept, and elements further apart reduced.
  static bool adds_columns(Nest nest) {
    sort_loops(nest, Access(widest(nest)));
    return nest.reduces() && !nest.reduced.back();
  }

  // Where an access begins in its storage, as the number of a storage and bytes.
  std::pair<uint32_t, int64_t> place_of(const Access& access) const {
    const graph::Buffer& buffer = graph_.buffers[access.buffer];
    const int64_t base = buffer.written ? buffer.group_offset : 0;
    return {buffer.group, base + access.offset * graph::element_bytes(access.dtype)};
  }

  bool same_place(const Access& a, const Access& b) const {
    if (a.buffer == kNoBuffer || b.buffer == kNoBuffer) return false;
    return a.dtype == b.dtype && place_of(a) == place_of(b);
  }

  // Whether elements of one nest depend on other elements of the other.
  bool clash(const Nest& a, const std::vector<bool>& a_writes, const Nest& b,
             const std::vector<bool>& b_writes) const {
    for (size_t i = 0; i < a.accesses.size(); ++i) {
      for (size_t j = 0; j < b.accesses.size(); ++j) {
        if (!a_writes[i] && !b_writes[j]) continue;
        const Access& one = a.accesses[i];
        const Access& other = b.accesses[j];
        if (one.buffer == kNoBuffer || other.buffer == kNoBuffer) continue;
        if (graph_.buffers[one.buffer].group != graph_.buffers[other.buffer].group) continue;
        if (same_place(one, other) && one.strides == other.strides) continue;
        const int64_t shift = place_of(one).second - place_of(other).second;
        const ByteRange x = bytes_of({0, one.dtype, 0, one.strides}, a.sizes);
        const ByteRange y = bytes_of({0, other.dtype, 0, other.strides}, b.sizes);
        if (x.begin + shift < y.end && y.begin < x.end + shift) return true;
      }
    }
    return false;
  }

  // The accesses by which two clusters can be brought into one order: of the same place, one of
  // them a write, or both reads that move with all loops. Those that move with the most loops say
  // the most about the order.
  std::optional<std::pair<size_t, size_t>> link(const Open& a, const Open& b, Shared shared) const {
    const bool reads = shared == Shared::kRead;
    std::optional<std::pair<size_t, size_t>> found;
    for (size_t i = a.nest.accesses.size(); i-- > 0;) {
      const Access& one = a.nest.accesses[i];
      if (reads && !moves_always(one)) continue;
      if (found.has_value() && moving_loops(one) <= moving_loops(a.nest.accesses[found->first])) {
        continue;
      }
      for (size_t j = 0; j < b.nest.accesses.size(); ++j) {
        if (!reads && !a.writes[i] && !b.writes[j]) continue;
        if (!same_place(one, b.nest.accesses[j])) continue;
        if (reads && !moves_always(b.nest.accesses[j])) continue;
        found = {i, j};
        break;
      }
    }
    return found;
  }

  // Brings the loops of two nests into one form. False where there is none.
  static bool unite(Nest& x, Nest& y) {
    if (x.reduces() && !y.reduces() && product(y.sizes) == x.kept_elements()) {
      return spread_kept(y, x);
    }
    if (y.reduces() && !x.reduces() && product(x.sizes) == y.kept_elements()) {
      return spread_kept(x, y);
    }
    if (product(x.sizes) != product(y.sizes) || !refine(x, y)) return false;
    // What has no reductions is done for each turn of the loops that the other reduces.
    if (!x.reduces()) x.reduced = y.reduced;
    if (!y.reduces()) y.reduced = x.reduced;
    return x.reduced == y.reduced;
  }

  bool join(uint32_t a_index, uint32_t b_index, Shared shared) {
    const Open& a = open_[a_index];
    const Open& b = open_[b_index];
    if (a.ambient != b.ambient) return false;
    if (a.elements != b.elements && !a.nest.reduces() && !b.nest.reduces()) return false;
    const size_t accesses = a.nest.accesses.size() + b.nest.accesses.size();
    if (accesses > kMaxAccesses) return false;
    if (a.draws > 0 && b.draws > 0 && a.draws + b.draws > kMaxDraws) return false;
    const auto common = link(a, b, shared);
    if (!common.has_value()) return false;
    Nest x = a.nest;
    Nest y = b.nest;
    sort_loops(x, Access(x.accesses[common->first]));
    sort_loops(y, Access(y.accesses[common->second]));
    coalesce(x);
    coalesce(y);
    if (!unite(x, y) || x.sizes.size() > kMaxLoops) return false;
    if (accesses > kMaxColumnAccesses && (adds_columns(x) || adds_columns(y))) return false;
    if (clash(x, a.writes, y, b.writes)) return false;
    if (holds_memory(a, b) || !bring_together(a_index, b_index)) return false;
    merge(a_index, b_index, std::move(x), std::move(y));
    return true;
  }

  // Whether joining would keep more memory alive than it saves. If anything runs between the two,
  // what only the earlier one reads has to live until the later one: the sum of many products, say,
  // which come one after the other, would hold them all. What passes between the two is saved. What
  // is computed once more is not to be held from where it could be first.
  bool holds_memory(const Open& a, const Open& b) const {
    if (!is_apart(a, b)) return false;
    const Open& early = a.high < b.low ? a : b;
    const Open& late = a.high < b.low ? b : a;
    if (late.again) return true;
    uint64_t held = 0;
    uint64_t saved = 0;
    std::vector<uint32_t> counted;
    for (size_t i = 0; i < early.nest.accesses.size(); ++i) {
      if (early.nest.accesses[i].buffer == kNoBuffer) continue;
      const uint32_t group = graph_.buffers[early.nest.accesses[i].buffer].group;
      const graph::Buffer& buffer = graph_.buffers[group];
      if (buffer.kind != graph::BufferKind::kFresh) continue;
      if (std::ranges::find(counted, group) != counted.end()) continue;
      counted.push_back(group);
      const bool ends_early = last_use_[group] <= early.high;
      const bool made_early = first_use_[group] >= early.low;
      if (ends_early && !made_early) held += buffer.nbytes;
      if (made_early && !ends_early && last_use_[group] <= late.high) saved += buffer.nbytes;
    }
    return held > saved;
  }

  // Brings two clusters next to each other in the order, if no third one has to run between them.
  // What stands between and depends on the first goes behind the second; that is possible unless
  // the second depends on some of it.
  bool bring_together(uint32_t a, uint32_t b) {
    const uint32_t first = position_[a] < position_[b] ? a : b;
    const uint32_t second = first == a ? b : a;
    const uint32_t begin = position_[first];
    const uint32_t end = position_[second];
    ++mark_;
    marks_[first] = mark_;
    for (uint32_t i = begin + 1; i < end; ++i) {
      const uint32_t at = order_[i];
      if (at != kNobody && depends_on_marked(at, kNobody)) marks_[at] = mark_;
    }
    if (depends_on_marked(second, first)) return false;

    std::vector<uint32_t> behind;
    uint32_t next = begin;
    for (uint32_t i = begin + 1; i < end; ++i) {
      if (order_[i] == kNobody) continue;
      if (marks_[order_[i]] == mark_) {
        behind.push_back(order_[i]);
      } else {
        put(next++, order_[i]);
      }
    }
    put(next++, first);
    put(next++, second);
    for (const uint32_t each : behind) put(next++, each);
    while (next <= end) order_[next++] = kNobody;
    return true;
  }

  void put(uint32_t position, uint32_t cluster) {
    order_[position] = cluster;
    position_[cluster] = position;
  }

  bool depends_on_marked(uint32_t cluster, uint32_t other_than) const {
    for (const uint32_t node : open_[cluster].nodes) {
      for (const uint32_t before : before_[node]) {
        const uint32_t on = owner_[before];
        if (on != cluster && on != other_than && marks_[on] == mark_) return true;
      }
    }
    return false;
  }

  // Puts b into a, nodes in order.
  void merge(uint32_t a_index, uint32_t b_index, Nest x, Nest y) {
    Open& a = open_[a_index];
    Open& b = open_[b_index];
    Open made;
    made.ambient = a.ambient;
    made.elements = std::max(a.elements, b.elements);
    made.low = std::min(a.low, b.low);
    made.high = std::max(a.high, b.high);
    made.draws = a.draws + b.draws;
    made.again = a.again && b.again;
    made.nest.sizes = x.sizes;
    made.nest.reduced = x.reduced;
    const auto take = [&made](Open& from, Nest& nest, size_t i) {
      const size_t end = i + 1 < from.nodes.size() ? from.first[i + 1] : nest.accesses.size();
      made.nodes.push_back(from.nodes[i]);
      made.first.push_back(static_cast<uint32_t>(made.nest.accesses.size()));
      for (size_t k = from.first[i]; k < end; ++k) {
        made.nest.accesses.push_back(std::move(nest.accesses[k]));
        made.writes.push_back(from.writes[k]);
      }
    };
    for (size_t i = 0, j = 0; i < a.nodes.size() || j < b.nodes.size();) {
      const bool from_a = j == b.nodes.size() || (i < a.nodes.size() && a.nodes[i] < b.nodes[j]);
      if (from_a) {
        take(a, x, i++);
      } else {
        take(b, y, j++);
      }
    }
    for (const uint32_t node : b.nodes) owner_[node] = a_index;
    order_[position_[b_index]] = kNobody;
    b = Open();
    a = std::move(made);
  }

  std::vector<Cluster> in_order() {
    std::vector<Cluster> ordered;
    for (const uint32_t at : order_) {
      if (at != kNobody) ordered.push_back(std::move(static_cast<Cluster&>(open_[at])));
    }
    return ordered;
  }

  const Graph& graph_;
  const bool in_parts_;
  const std::vector<std::vector<uint32_t>> before_;  // per node: those that it depends on
  std::vector<uint32_t> owner_;                      // per node: its cluster
  std::vector<uint32_t> first_use_;                  // per storage, by its first buffer: nodes
  std::vector<uint32_t> last_use_;
  std::vector<uint32_t> others_before_;  // per node: how many before it are not elementwise
  std::vector<Open> open_;
  // Clusters in an order that satisfies every dependence; kNobody where one was joined to another.
  std::vector<uint32_t> order_;
  std::vector<uint32_t> position_;  // per cluster, in the order
  std::vector<uint32_t> marks_;     // per cluster: equal to mark_ where it is marked
  uint32_t mark_ = 0;
};

}  // namespace

std::vector<Cluster> fuse(const Graph& graph, bool in_parts) {
  return Fusion(graph, in_parts).run();
}

}  // namespace acc::passes
