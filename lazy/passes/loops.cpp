#include "lazy/passes/loops.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>

#include "csrc/base/check.h"

namespace acc::passes {
namespace {

// The sizes of the loops that two nests of equally many elements can both be split into, outermost
// first; nothing when there are none.
std::optional<std::vector<int64_t>> common_sizes(std::span<const int64_t> a,
                                                 std::span<const int64_t> b) {
  std::vector<int64_t> sizes;
  int64_t left_a = 1;  // of the loop at hand
  int64_t left_b = 1;
  size_t next_a = a.size();
  size_t next_b = b.size();
  for (;;) {
    if (left_a == 1 && next_a > 0) left_a = a[--next_a];
    if (left_b == 1 && next_b > 0) left_b = b[--next_b];
    if (left_a == 1 && left_b == 1) break;
    const int64_t step = std::min(left_a, left_b);
    if (step == 1 || left_a % step != 0 || left_b % step != 0) return std::nullopt;
    sizes.push_back(step);
    left_a /= step;
    left_b /= step;
  }
  std::ranges::reverse(sizes);
  return sizes;
}

// Splits loops so that they have `sizes`, which refine those of the nest.
void split(Nest& nest, const std::vector<int64_t>& sizes) {
  for (Access& access : nest.accesses) {
    std::vector<int64_t> strides(sizes.size());
    size_t loop = nest.sizes.size();
    int64_t left = 1;
    int64_t stride = 0;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (left == 1) {
        --loop;
        left = nest.sizes[loop];
        stride = access.strides[loop];
      }
      strides[i] = stride;
      stride *= sizes[i];
      left /= sizes[i];
    }
    access.strides = std::move(strides);
  }
  std::vector<bool> reduced(sizes.size());
  size_t loop = nest.sizes.size();
  int64_t left = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (left == 1) left = nest.sizes[--loop];
    reduced[i] = nest.reduced[loop];
    left /= sizes[i];
  }
  nest.reduced = std::move(reduced);
  nest.sizes = sizes;
}

}  // namespace

bool Nest::reduces() const { return std::ranges::find(reduced, true) != reduced.end(); }

int64_t Nest::kept_elements() const {
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) elements *= reduced[i] ? 1 : sizes[i];
  return elements;
}

int64_t product(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

void reorder(Nest& nest, std::span<const size_t> order) {
  const auto pick = [&]<class T>(std::vector<T>& from) {
    std::vector<T> picked;
    picked.reserve(order.size());
    for (const size_t i : order) picked.push_back(from[i]);
    from = std::move(picked);
  };
  pick(nest.sizes);
  pick(nest.reduced);
  for (Access& access : nest.accesses) pick(access.strides);
}

void sort_loops(Nest& nest, const Access& by) {
  std::vector<size_t> order;
  for (size_t i = 0; i < nest.sizes.size(); ++i) {
    if (nest.sizes[i] != 1) order.push_back(i);
  }
  const std::vector<int64_t> keys = by.strides;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::abs(keys[a]) > std::abs(keys[b]); });
  reorder(nest, order);
}

void coalesce(Nest& nest) {
  for (size_t i = nest.sizes.size(); i-- > 1;) {
    const bool one = std::ranges::all_of(nest.accesses, [&](const Access& access) {
      return access.strides[i - 1] == access.strides[i] * nest.sizes[i];
    });
    if (!one || nest.reduced[i - 1] != nest.reduced[i]) continue;
    const auto at = static_cast<std::ptrdiff_t>(i);
    nest.sizes[i - 1] *= nest.sizes[i];
    nest.sizes.erase(nest.sizes.begin() + at);
    nest.reduced.erase(nest.reduced.begin() + at);
    for (Access& access : nest.accesses) {
      access.strides[i - 1] = access.strides[i];
      access.strides.erase(access.strides.begin() + at);
    }
  }
}

bool refine(Nest& a, Nest& b) {
  const auto sizes = common_sizes(a.sizes, b.sizes);
  if (!sizes.has_value()) return false;
  split(a, *sizes);
  split(b, *sizes);
  return true;
}

bool spread_kept(Nest& kept, Nest& whole) {
  // Only the kept loops of the whole nest, without accesses.
  Nest outline;
  for (size_t i = 0; i < whole.sizes.size(); ++i) {
    if (!whole.reduced[i]) outline.sizes.push_back(whole.sizes[i]);
  }
  outline.reduced.assign(outline.sizes.size(), false);
  const auto sizes = common_sizes(kept.sizes, outline.sizes);
  if (!sizes.has_value()) return false;
  split(kept, *sizes);
  // The same splits in the whole nest.
  std::vector<int64_t> all;
  std::vector<bool> is_kept;
  size_t next = 0;
  for (size_t i = 0; i < whole.sizes.size(); ++i) {
    int64_t left = whole.sizes[i];
    if (whole.reduced[i]) {
      all.push_back(left);
      is_kept.push_back(false);
      continue;
    }
    for (; left > 1; left /= sizes->at(next++)) {
      all.push_back(sizes->at(next));
      is_kept.push_back(true);
    }
  }
  split(whole, all);
  for (Access& access : kept.accesses) {
    std::vector<int64_t> strides(all.size(), 0);
    size_t from = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_kept[i]) strides[i] = access.strides[from++];
    }
    access.strides = std::move(strides);
  }
  kept.sizes = std::move(all);
  kept.reduced = whole.reduced;
  return true;
}

ByteRange bytes_of(const Access& access, std::span<const int64_t> sizes) {
  int64_t low = access.offset;
  int64_t high = access.offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t reach = (sizes[i] - 1) * access.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = static_cast<int64_t>(graph::element_bytes(access.dtype));
  return {low * bytes, (high + 1) * bytes};
}

bool is_injective(const Access& access, std::span<const int64_t> sizes) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&](size_t i) { return std::abs(access.strides[i]); });
  int64_t reach = 0;  // of the loops so far
  for (const size_t i : order) {
    if (sizes[i] == 1) continue;
    if (std::abs(access.strides[i]) <= reach) return false;
    reach += (sizes[i] - 1) * std::abs(access.strides[i]);
  }
  return true;
}

}  // namespace acc::passes
