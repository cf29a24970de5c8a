"""One sample of one operator in a half type, as PyTorch's tests of CUDA compare it.

Kernels are generated here, and products computed in float32: what a program gets, which is not the
CPU's bits. PyTorch holds CUDA's results against the CPU's in the same type (`test_compare_cpu`),
within `torch.testing`'s tolerances of the type, or those that its database asks for instead. Where
two results are further apart, the better one is right: as in `test_python_ref` a sample passes that
is no further from the computation in float64 than the CPU's. Operators that have kernels of the
type on CUDA and none on the CPU are compared with float32's results, rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests import helpers
from tests.opinfo import check
from tests.opinfo.compare import Arguments

# PyTorch's tests of operators on CUDA against the CPU or NumPy. What the database asks of them, and
# not of tests of its compiler or of other devices, is CUDA's tolerance.
TESTS = (
    ("TestCommon", "test_compare_cpu"),
    ("TestUnaryUfuncs", "test_reference_numerics_normal"),
    ("TestBinaryUfuncs", "test_reference_numerics"),
    ("TestReductions", "test_ref_small_input"),
)


def tolerances(op: OpInfo, dtype: torch.dtype) -> tuple[float, float]:
    """The relative and the absolute tolerance of PyTorch's tests of the operator on CUDA."""
    relative, absolute = default_tolerances(dtype)
    for of_class, test in TESTS:
        for decorator in op.get_decorators(of_class, test, "cuda", dtype, {}):
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                absolute = max(absolute, decorator.d[dtype].atol)
                relative = max(relative, decorator.d[dtype].rtol)
            elif isinstance(decorator, precisionOverride) and dtype in decorator.d:
                absolute = max(absolute, decorator.d[dtype])
    return relative, absolute


class HalfChecker(check.Checker):
    """Compares values within tolerances; everything else as `Checker` does."""

    def __init__(self, op: OpInfo, dtype: torch.dtype) -> None:
        super().__init__(op, check.HALF, dtype)
        self._relative, self._absolute = tolerances(op, dtype)
        self._on_cpu = dtype in op.supported_dtypes("cpu")
        self._sample: SampleInput

    def check(self, sample: SampleInput, index: int) -> list[check.Failure]:
        self._sample = sample
        return super().check(sample, index)

    def _call(self, a: Arguments) -> Any:
        if self._on_cpu or any(t.device.type != "cpu" for t in a.tensors()):
            return super()._call(a)
        wide = _in(torch.float32, a, self.dtype)
        result = helpers.tree_map(self._narrow, super()._call(wide))
        for argument, changed in zip(a.tensors(), wide.tensors(), strict=True):
            if changed is not argument:
                argument.detach().copy_(changed)
        return result

    def _narrow(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_complex():
            return leaf.to(torch.complex32)
        return leaf.to(self.dtype) if leaf.dtype == torch.float32 else leaf

    def _differences(self, actual: Any, expected: Any, values: bool) -> list[check.Failure]:
        found = helpers.differences(actual, expected, values=False)
        if found or not values:
            return found
        exact = helpers.differences(actual, expected)
        if not exact:
            return []
        mine = [helpers.to_cpu(t) for t in helpers.tensors(actual)]
        theirs = [helpers.to_cpu(t) for t in helpers.tensors(expected)]
        if all(map(self._are_close, mine, theirs)) or self._is_better(mine, theirs):
            return []
        return exact

    def _are_close(self, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        relative, absolute = self._relative, self._absolute
        if not (mine.is_floating_point() or mine.is_complex()):
            relative = absolute = 0.0
        elif mine.dtype != self.dtype:
            default = default_tolerances(mine.dtype)
            relative, absolute = max(relative, default[0]), max(absolute, default[1])
        return torch.allclose(mine, theirs, relative, absolute, equal_nan=True)

    def _is_better(self, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        """Whether the results are no further from the computation in float64 than the CPU's."""
        given = Arguments(self._sample.input, tuple(self._sample.args), dict(self._sample.kwargs))
        precise = check.attempt(lambda: super(HalfChecker, self)._call(self._precise(given)))
        if precise.error is not None:
            return False
        truth = helpers.tensors(precise.value)
        if [t.shape for t in truth] != [t.shape for t in mine]:
            return False
        return _distance(mine, truth) <= _distance(theirs, truth)

    def _precise(self, given: Arguments) -> Arguments:
        return _in(torch.float64, given, self.dtype)


def _in(kind: torch.dtype, a: Arguments, dtype: torch.dtype) -> Arguments:
    """The arguments with everything of the type `dtype` in the type `kind`."""

    def one(leaf: Any) -> Any:
        if leaf is dtype:
            return kind
        if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype:
            return leaf.detach().to(kind)
        return leaf

    return Arguments(*helpers.tree_map(one, a.all()))


def _distance(results: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The sum of the errors; infinite with an infinity or a NaN on one side only."""
    total = 0.0
    for result, true in zip(results, truth, strict=True):
        wide = torch.complex128 if true.is_complex() else torch.float64
        mine, true = result.to(wide), true.to(result.dtype).to(wide)
        same = (mine == true) | (mine.isnan() & true.isnan())
        error = torch.where(same, 0.0, (mine - true).abs()).sum()
        total += float(error) if error.isfinite() else float("inf")
    return total
