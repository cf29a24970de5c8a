#include "lazy/record/overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <functional>
#include <ranges>
#include <utility>

namespace acc::record {
namespace {

// The elements of two views along one stride: those of the first at 0 to `first` - 1, those of the
// second at `shift` to `shift + second` - 1.
struct Axis {
  int64_t stride;
  int64_t first = 1;
  int64_t second = 1;
  int64_t shift = 0;
};
using Axes = c10::SmallVector<Axis, 8>;

bool strided_alike(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Adds the dimensions of a tensor; false where two of them have one stride.
bool add(const at::Tensor& tensor, int64_t Axis::* size, Axes* axes) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 1 || tensor.stride(d) == 0) continue;
    if (tensor.stride(d) < 0) return false;
    auto axis = std::ranges::find(*axes, tensor.stride(d), &Axis::stride);
    if (axis == axes->end()) axis = axes->insert(axes->end(), Axis{tensor.stride(d)});
    if ((*axis).*size != 1) return false;
    (*axis).*size = tensor.size(d);
  }
  return true;
}

// Whether two views that begin `distance` >= 0 elements apart have none in common, as far as it can
// be told: no two places of the box around both are one element, and they are apart along an axis.
bool apart(Axes axes, int64_t distance) {
  std::ranges::sort(axes, std::greater(), &Axis::stride);
  for (Axis& axis : axes) {
    axis.shift = distance / axis.stride;
    distance %= axis.stride;
  }
  if (distance > 0) axes.push_back({1, 1, 1, distance});
  int64_t reach = 0;  // of the axes with smaller strides
  bool found = false;
  for (const Axis& axis : std::ranges::reverse_view(axes)) {
    if (axis.stride <= reach) return false;
    reach += (std::max(axis.first, axis.shift + axis.second) - 1) * axis.stride;
    found = found || axis.shift >= axis.first;
  }
  return found;
}

}  // namespace

at::MemOverlapStatus overlap_status(const at::Tensor& a, const at::Tensor& b) {
  const auto status = at::get_overlap_status(a.unsafeGetTensorImpl(), b.unsafeGetTensorImpl());
  if (status != at::MemOverlapStatus::TooHard || !a.is_alias_of(b) ||
      a.element_size() != b.element_size()) {
    return status;
  }
  if (a.storage_offset() == b.storage_offset() && strided_alike(a, b)) {
    return at::MemOverlapStatus::Full;
  }
  Axes axes;
  const bool in_order = a.storage_offset() <= b.storage_offset();
  const at::Tensor& first = in_order ? a : b;
  const at::Tensor& second = in_order ? b : a;
  if (!add(first, &Axis::first, &axes) || !add(second, &Axis::second, &axes)) return status;
  const int64_t distance = second.storage_offset() - first.storage_offset();
  return apart(std::move(axes), distance) ? at::MemOverlapStatus::No : status;
}

}  // namespace acc::record
