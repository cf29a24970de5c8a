#include <ATen/core/List.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

// torch.where in place, which ATen has not: elements stay where the condition holds, and are those
// of `other` elsewhere. On lists it takes a step of an optimizer back.
namespace acc::library {
namespace {

using at::Tensor;

Tensor& where_(Tensor& self, const Tensor& condition, const Tensor& other) {
  TORCH_CHECK(self.scalar_type() == other.scalar_type(),
              "[acc::where_] takes tensors of one dtype,", " not ", self.scalar_type(), " and ",
              other.scalar_type(), ".");
  return self.copy_(at::where(condition, self, other));
}

void foreach_where_(at::TensorList self, const Tensor& condition, at::TensorList other) {
  TORCH_CHECK(self.size() == other.size(), "[acc::_foreach_where_] takes lists of one length, not ",
              self.size(), " and ", other.size(), " tensors.");
  for (size_t i = 0; i < self.size(); ++i) {
    Tensor mine = self[i];
    where_(mine, condition, other[i]);
  }
}

TORCH_LIBRARY_FRAGMENT(acc, m) {
  m.def("where_(Tensor(a!) self, Tensor condition, Tensor other) -> Tensor(a!)",
        {at::Tag::pointwise});
  m.def("_foreach_where_(Tensor(a!)[] self, Tensor condition, Tensor[] other) -> ()");
}

void put_where(torch::Library& m) {
  m.impl("where_", &where_);
  m.impl("_foreach_where_", &foreach_where_);
}

TORCH_LIBRARY_IMPL(acc, CPU, m) { put_where(m); }
TORCH_LIBRARY_IMPL(acc, CUDA, m) { put_where(m); }
TORCH_LIBRARY_IMPL(acc, Meta, m) { put_where(m); }

}  // namespace
}  // namespace acc::library
