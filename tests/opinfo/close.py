"""One sample of one operator as a program gets it, compared as PyTorch's tests of CUDA compare it.

Kernels are generated here, and products of half types computed in float32, which is not the CPU's
bits. A call has its kernels when it comes the third time, and an elementwise operator only beside
another: so the results are negated, and the call is repeated.

PyTorch holds CUDA's results against the CPU's in the same type (`test_compare_cpu`), within
`torch.testing`'s tolerances of the type, or those that its database asks for instead. Where two
results are further apart, the better one is right: as in `test_python_ref` a sample passes that is
no further from the computation in float64 than the CPU's. Operators that have kernels of a half
type on CUDA and none on the CPU are compared with float32's results, rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests import helpers
from tests.opinfo import check
from tests.opinfo.compare import Arguments, cotangent

RUNS_WITHOUT_KERNELS = 2

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


class CloseChecker(check.Checker):
    """Compares values within tolerances; everything else as `Checker` does."""

    def __init__(self, op: OpInfo, variant: str, dtype: torch.dtype) -> None:
        super().__init__(op, variant, dtype)
        self._relative, self._absolute = tolerances(op, dtype)
        self._on_cpu = dtype in op.supported_dtypes("cpu")
        self._sample: SampleInput
        self._in_float64: Callable[[Arguments], Any]  # what is checked, of arguments in float64

    def programs(self, sample: SampleInput) -> list[Callable[[], Any]]:
        """What `check` runs, without the checks: for `helpers.compile_together`."""
        runs = [self._call]
        if self.with_gradient(sample):
            runs.append(lambda a: self._gradients(sample, a))
        given = [(run, check.attempt(lambda: self._arguments(sample)).value) for run in runs]
        # What fails here fails where it is checked.
        return [lambda f=run, a=a: check.attempt(lambda: f(a)) for run, a in given if a]

    def check(self, sample: SampleInput, index: int) -> list[check.Failure]:
        self._sample = sample
        found = super().check(sample, index)
        if helpers.stats().get("jit/failed", 0):
            found.append(("raises", "a kernel, of this sample or before, could not be compiled"))
        return found

    def _check_forward(self, sample: SampleInput, index: int) -> list[check.Failure]:
        self._in_float64 = lambda a: _followed(super(CloseChecker, self)._call(a))
        self._await_kernels(self._call, index)
        with helpers.counting() as counted:
            found = super()._check_forward(sample, index)
        self.fused += counted["kernel_launches"] > 0
        return found

    def _check_gradient(self, sample: SampleInput, index: int) -> list[check.Failure]:
        self._in_float64 = lambda a: self._gradients(sample, a)
        self._await_kernels(self._in_float64, index)
        with helpers.counting() as counted:
            found = super()._check_gradient(sample, index)
        self.fused_gradients += counted["kernel_launches"] > 0
        return found

    def _await_kernels(self, run: Callable[[Arguments], Any], index: int) -> None:
        """Runs the sample as it will be run, as often as it has no kernels yet."""
        # With captures the first run with kernels is captured, and what is captured comes again.
        for _ in range(RUNS_WITHOUT_KERNELS + helpers.EMULATED):
            made = check.attempt(lambda: self._arguments(self._sample)).value
            check.seed(1000 + index)
            kept = check.attempt(lambda a=made: run(a))  # what is wrong here the check tells
            check.attempt(helpers.flush)
            del kept
        check.seed(1000 + index)

    def _arguments(self, sample: SampleInput, spread: bool = False) -> Arguments:
        made = super()._arguments(sample, spread)
        helpers.flush()  # how they are made is no part of the plan
        return made

    def _call(self, a: Arguments) -> Any:
        return _followed(self._value(a))

    def _value(self, a: Arguments) -> Any:
        if self._on_cpu or any(t.device.type != "cpu" for t in a.tensors()):
            return super()._call(a)
        wide = _in(torch.float32, a, self.dtype)
        result = helpers.tree_map(self._narrow, super()._call(wide))
        for argument, changed in zip(a.tensors(), wide.tensors(), strict=True):
            if changed is not argument:
                argument.detach().copy_(changed)
        return result

    def _gradients(self, sample: SampleInput, a: Arguments) -> list[Any]:
        return list(_followed(super()._gradients(sample, a)))

    def _cotangent(self, t: torch.Tensor, seed: int) -> torch.Tensor:
        return cotangent(_in_single(t), seed).to(t.dtype)  # the same values in float64

    def _not_recorded(
        self, recorded: check.Recorded, result: Any, a: Arguments
    ) -> list[check.Failure]:
        value, negated = result
        recorded.nodes -= len(negated)
        return super()._not_recorded(recorded, value, a)

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

    def _changes(self, actual: Any, expected: Any, values: bool) -> list[check.Failure]:
        found = super()._changes(actual, expected, values)
        if {kind for kind, _ in found} - {"value", "close"}:
            return found
        pairs = zip(actual, expected, strict=True)
        return [] if all(self._are_close(helpers.to_cpu(a), e) for a, e in pairs) else found

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
        precise = check.attempt(lambda: self._in_float64(_in(torch.float64, given, self.dtype)))
        if precise.error is not None:
            return False
        truth = helpers.tensors(precise.value)
        if [t.shape for t in truth] != [t.shape for t in mine]:
            return False
        return _distance(mine, truth) <= _distance(theirs, truth)


def _followed(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A result, and its negation by a node of its own."""
    dense = [t for t in helpers.tensors(value) if t.layout == torch.strided and t.numel()]
    negated = [
        torch.logical_not(t) if t.dtype == torch.bool else torch.neg(t)
        for t in dense
        if t.dtype == torch.bool or t.is_floating_point()
    ]
    return value, negated


def _in_single(t: torch.Tensor) -> torch.Tensor:
    """The tensor in single precision, if it is in double."""
    return t.detach().to(
        {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(t.dtype, t.dtype)
    )


def _in(kind: torch.dtype, a: Arguments, dtype: torch.dtype) -> Arguments:
    """The arguments with everything of the type `dtype` in the type `kind`."""

    def one(leaf: Any) -> Any:
        if leaf is dtype:
            return kind
        if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype:
            return leaf.detach().to(kind).requires_grad_(leaf.requires_grad)
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
