"""PyTorch's operator database in float16 and bfloat16, within PyTorch's tolerances for CUDA.

The first sample of every eighth operator; with `ACC_TEST_FULL=1` every sample of each. `half.py`
says what is compared with what.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.testing._internal.common_device_type import tol, toleranceOverride
from torch.testing._internal.opinfo.core import SampleInput

from tests import helpers
from tests.opinfo import check, exceptions, half, runner, survey

SHARE = 0.95
# What the pinned database holds; another version of torch has other numbers, hence "at least".
SAMPLES = {"float16": 15_600, "bfloat16": 15_400}
EVERY = 1 if helpers.FULL else 8
full_only = pytest.mark.skipif(not helpers.FULL, reason="some samples say nothing of the share")


@pytest.fixture(scope="module")
def results(acc_only_module: None) -> list[runner.Result]:
    wanted = runner.requests(runner.SOURCE, [check.HALF], check.HALVES, [])
    names = list(dict.fromkeys(request["op"] for request in wanted))[::EVERY]
    chosen = [request for request in wanted if request["op"] in set(names)]
    if not helpers.FULL:
        chosen = [{**request, "first": 1} for request in chosen]
    jobs = int(os.environ.get("ACC_TEST_JOBS", "1")) if helpers.FULL else 1
    return runner.run(chosen, jobs=jobs, env=helpers.child_env(ACC_DETERMINISTIC="1"))


@pytest.fixture(scope="module")
def acc_only_module() -> None:
    if not helpers.ON_ACC:
        pytest.skip("the CPU's own results in half types are what is compared with")


@pytest.mark.timeout(7200)
def test_within_tolerances_but_for_the_listed_exceptions(results):
    assert len(results) > 2000 / EVERY / 2
    text = "\n".join(survey.by_op(results, False))
    assert not text, f"half types:\n{text}"


@full_only
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", SAMPLES)
def test_at_least_95_of_100_samples_pass(results, dtype):
    # Those that are excepted have failed all the same.
    counts = survey.totals([r for r in results if r.dtype == dtype])
    samples, failed, _ = counts[check.HALF]
    assert samples >= SAMPLES[dtype]
    assert failed <= (1 - SHARE) * samples


@full_only
@pytest.mark.timeout(7200)
def test_every_exception_is_needed(results):
    seen = {(r.op, category, r.dtype) for r in results for _, category, _ in r.failures}
    listed = [e for e in exceptions.EXCEPTED if e.variant == check.HALF]
    stale = [
        f"{e.op} {e.category}"
        for e in listed
        if not any((e.op, e.category, d) in seen for d in e.dtypes or SAMPLES)
    ]
    assert not stale, "take out of tests/opinfo/exceptions.py:\n" + "\n".join(stale)


# --- the comparison itself ------------------------------------------------------------------------


class Operator:
    """Adds to its argument an error of the device under test, or of the CPU; in float64 none."""

    name, variant_test_name = "fake", ""

    def __init__(self, mine: float, theirs: float = 0.0, override: float = 0.0) -> None:
        self.errors = {helpers.DEVICE: mine, "cpu": theirs}
        self.override = override

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return set(check.HALVES)

    def get_decorators(self, of_class: str, *rest: Any) -> list[Any]:
        wide = toleranceOverride({torch.float16: tol(atol=self.override, rtol=0)})
        return [wide] if of_class == "TestUnaryUfuncs" else []

    def op(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1 if x.dtype == torch.float64 else x * (1 + self.errors[x.device.type])


@pytest.mark.parametrize(
    ("operator", "dtype", "passes"),
    [
        (Operator(0), torch.float16, True),
        (Operator(2**-10), torch.float16, True),  # one unit in the last place
        (Operator(2**-8), torch.float16, False),
        (Operator(2**-7), torch.bfloat16, True),
        (Operator(2**-5), torch.bfloat16, False),
        (Operator(float("inf")), torch.float16, False),
        (Operator(2**-8, override=0.5), torch.float16, True),  # the database asks for no more
        (Operator(2**-8, override=0.5), torch.bfloat16, True),
        (Operator(2**-5, override=0.5), torch.bfloat16, False),  # not of this type
        (Operator(0, theirs=2**-5), torch.float16, True),  # better than the CPU
        (Operator(2**-6, theirs=-(2**-5)), torch.float16, True),
        (Operator(2**-4, theirs=-(2**-5)), torch.float16, False),
    ],
)
def test_what_is_close_or_better_passes(acc_only, operator, dtype, passes):
    sample = SampleInput(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dtype))
    found = half.HalfChecker(operator, dtype).check(sample, 0)
    assert (not found) == passes, found


def test_without_kernels_on_the_cpu_float32_is_the_reference(acc_only):
    class OnlyCuda(Operator):
        def supported_dtypes(self, device):
            return set(check.HALVES) if device == "cuda" else set()

        def op(self, x):
            assert x.device.type != "cpu" or x.dtype in (torch.float32, torch.float64)
            return x.add_(x) / 3

    for dtype in check.HALVES:
        sample = SampleInput(torch.arange(1, 9, dtype=dtype))
        assert half.HalfChecker(OnlyCuda(0), dtype).check(sample, 0) == []
