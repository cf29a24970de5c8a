#include "lazy/passes/axes.h"

#include <algorithm>
#include <string>

#include "lazy/graph/dtype.h"

namespace acc::passes {
namespace {

using graph::Tag;

// The words of the argument of that name; null if there is none.
const int64_t* find_argument(const graph::Op& op, std::span<const int64_t* const> items,
                             const std::string& name) {
  const auto found = std::ranges::find(op.arguments, name, &graph::Argument::name);
  if (found == op.arguments.end()) return nullptr;
  return items[static_cast<size_t>(found - op.arguments.begin())];
}

// An integer that stands in the words, not in the value block.
bool is_fixed(const int64_t* word) {
  return graph::tag_of(*word) == Tag::kInt && (graph::flags_of(*word) & graph::kValueFlag) == 0;
}

}  // namespace

std::optional<Axes> Axes::find(const graph::Formula& formula, const graph::Op& op,
                               std::span<const int64_t* const> items,
                               const graph::TensorWords& whole) {
  Axes made(formula);
  made.whole_.assign(whole.sizes.begin(), whole.sizes.end());
  if (!formula.along.empty() && whole.sizes.size() < 2) return std::nullopt;
  if (formula.along == "group" && !made.find_groups(op, items)) return std::nullopt;
  Mapping mapping{made.whole_, made.whole_, {}};  // only for its sizes
  if (made.groups_ > 0) made.split(mapping, 1);
  made.sizes_ = std::move(mapping.sizes);
  if (!made.find_reduced(op, items)) return std::nullopt;
  return made;
}

bool Axes::find_groups(const graph::Op& op, std::span<const int64_t* const> items) {
  const int64_t* word = find_argument(op, items, "group");
  if (word == nullptr || !is_fixed(word) || whole_.size() < 2) return false;
  groups_ = word[1];
  return groups_ > 0 && whole_[1] % groups_ == 0;
}

bool Axes::find_reduced(const graph::Op& op, std::span<const int64_t* const> items) {
  const std::string& over = formula_->over;
  const size_t dims = sizes_.size();
  reduced_.assign(dims, over == "*" || over.starts_with("but") || over == "group");
  if (over.empty() || over == "*") return true;
  if (over == "but 1") {
    if (dims > 1) reduced_[1] = false;
    return dims > 1;
  }
  if (over == "group" || over == "but group") {
    reduced_[over == "group" ? 0 : 2] = false;
    reduced_[1] = false;
    return true;
  }
  const bool last = over.starts_with("last ");
  const bool first = over.starts_with("before last ");
  const int64_t* word = find_argument(op, items,
                                      last    ? over.substr(5)
                                      : first ? over.substr(12)
                                              : over);
  if (word == nullptr) return false;
  std::vector<const int64_t*> named{word};
  if (graph::tag_of(*word) == Tag::kList) {
    named = graph::items({word + 1, graph::item_words(word) - 1});
  }
  if (graph::tag_of(*word) == Tag::kNone) named.clear();
  if (last || first) {
    if (named.size() > dims) return false;
    const auto middle = reduced_.end() - static_cast<std::ptrdiff_t>(named.size());
    std::fill(reduced_.begin(), middle, first);
    std::fill(middle, reduced_.end(), last);
    return true;
  }
  if (named.empty()) reduced_.assign(dims, true);
  for (const int64_t* item : named) {
    if (!is_fixed(item)) return false;
    const int64_t dim = item[1] < 0 ? item[1] + static_cast<int64_t>(dims) : item[1];
    if (dim < 0 || dim >= static_cast<int64_t>(dims)) return false;
    reduced_[static_cast<size_t>(dim)] = true;
  }
  return true;
}

// Makes two dimensions of one: the groups, and what is in each.
void Axes::split(Mapping& mapping, size_t dim) const {
  const auto at = static_cast<std::ptrdiff_t>(dim);
  const int64_t each = mapping.sizes[dim] / groups_;
  mapping.sizes[dim] = each;
  mapping.sizes.insert(mapping.sizes.begin() + at, groups_);
  mapping.strides.insert(mapping.strides.begin() + at, mapping.strides[dim] * each);
}

Axes::Mapping Axes::map(const graph::TensorWords& tensor, bool result) const {
  const std::string& along = formula_->along;
  const size_t dims = tensor.sizes.size();
  Mapping mapping{{tensor.sizes.begin(), tensor.sizes.end()},
                  {tensor.strides.begin(), tensor.strides.end()},
                  {}};
  const auto skip_loop = [&](size_t skipped) {
    for (size_t loop = 0; loop < sizes_.size(); ++loop) {
      if (loop != skipped) mapping.loops.push_back(loop);
    }
  };
  if (along == "1" && dims == 1) {
    mapping.loops = {1};
  } else if (along == "but 1" && dims + 1 == sizes_.size()) {
    skip_loop(1);
  } else if (along == "group" && dims == 1 && tensor.sizes[0] % groups_ == 0) {
    split(mapping, 0);
    mapping.loops = {1, 2};
  } else if (along == "group" && std::ranges::equal(tensor.sizes, whole_)) {
    split(mapping, 1);
    skip_loop(sizes_.size());
  } else if (along == "group" && dims == 2) {
    mapping.loops = {0, 1};
  } else if (along.empty() && result && dims < sizes_.size()) {
    for (size_t loop = 0; loop < sizes_.size(); ++loop) {
      if (!reduced_[loop]) mapping.loops.push_back(loop);
    }
  } else if (dims <= sizes_.size()) {
    for (size_t i = 0; i < dims; ++i) mapping.loops.push_back(sizes_.size() - dims + i);
  }
  return mapping;
}

std::optional<Access> Axes::access(const graph::TensorWords& tensor, const Mapping& mapping) const {
  if (mapping.loops.size() != mapping.sizes.size()) return std::nullopt;
  Access made{tensor.buffer, tensor.dtype, tensor.offset, std::vector<int64_t>(sizes_.size(), 0)};
  for (size_t i = 0; i < mapping.loops.size(); ++i) {
    const size_t loop = mapping.loops[i];
    if (mapping.sizes[i] == 1) continue;
    if (mapping.sizes[i] != sizes_[loop]) return std::nullopt;
    made.strides[loop] = mapping.strides[i];
  }
  return made;
}

std::optional<Access> Axes::operand(const graph::TensorWords& tensor) const {
  return access(tensor, map(tensor, false));
}

std::optional<Access> Axes::result(const graph::TensorWords& tensor) const {
  const Mapping mapping = map(tensor, true);
  std::optional<Access> made = access(tensor, mapping);
  if (!made.has_value()) return std::nullopt;
  // One element for all turns of reduced loops that it does not lie along.
  std::vector<bool> missing = reduced_;
  for (size_t i = 0; i < mapping.loops.size(); ++i) {
    if (mapping.sizes[i] != 1) missing[mapping.loops[i]] = false;
  }
  std::vector<int64_t> sizes;
  Access moving = *made;
  moving.strides.clear();
  for (size_t loop = 0; loop < sizes_.size(); ++loop) {
    if (missing[loop]) continue;
    sizes.push_back(sizes_[loop]);
    moving.strides.push_back(made->strides[loop]);
  }
  if (!is_injective(moving, sizes)) return std::nullopt;
  return made;
}

std::optional<Access> Axes::position() const {
  constexpr int64_t kExact = 1 << 24;
  if (sizes_.size() < 2 || sizes_[1] > kExact) return std::nullopt;
  Access made{kNoBuffer, graph::dtype::kF32, 0, std::vector<int64_t>(sizes_.size(), 0)};
  made.strides[1] = sizes_[1] == 1 ? 0 : 1;
  return made;
}

Access Axes::index() const {
  Access made{kNoBuffer, graph::dtype::kI64, 0, std::vector<int64_t>(sizes_.size(), 0)};
  int64_t step = 1;
  for (size_t loop = sizes_.size(); loop-- > 0;) {
    if (sizes_[loop] != 1) made.strides[loop] = step;
    step *= sizes_[loop];
  }
  return made;
}

}  // namespace acc::passes
