#pragma once

#include "tests/cpp/graph_builder.h"

namespace acc::testing {

// Elementwise calls that the table of formulas knows, with the names of their arguments.
struct ElementwiseBuilder : GraphBuilder {
  uint32_t unary(const std::string& name, uint32_t x, int64_t n = 4) {
    const uint32_t y = fresh(static_cast<uint64_t>(n) * 4);
    call(name, {{x, n}}, {{y, n}});
    last_op().arguments[0].name = "self";
    return y;
  }
  uint32_t product(uint32_t x, uint32_t y, int64_t n = 4) {
    const uint32_t z = fresh(static_cast<uint64_t>(n) * 4);
    call("aten::mul.Tensor", {{x, n}, {y, n}}, {{z, n}});
    last_op().arguments[0].name = "self";
    last_op().arguments[1].name = "other";
    return z;
  }
  void scale_in_place(uint32_t x, uint32_t y, int64_t n = 4) {
    in_place("aten::mul_.Tensor", {{x, n}}, {{y, n}});
    last_op().arguments[0].name = "self";
    last_op().arguments[1].name = "other";
    last_op().returns.push_back({0, false});
  }
  uint32_t opaque(uint32_t x, int64_t n = 4) {
    const uint32_t y = fresh(static_cast<uint64_t>(n) * 4);
    call("aten::sort", {{x, n}}, {{y, n}});
    return y;
  }
};

}  // namespace acc::testing
