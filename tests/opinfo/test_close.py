"""PyTorch's operator database with generated kernels, within PyTorch's tolerances for CUDA.

In float32 with gradients, one sample of every operator that has a formula; in float16 and bfloat16
one of every sixteenth operator. With `ACC_TEST_FULL=1` every sample of each, float32 in mode
nograph too. The same once more as on a GPU, one sample of every operator with `ACC_TEST_FULL=1`.
`close.py` says what is compared with what.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch.testing._internal.common_device_type import tol, toleranceOverride
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests import helpers
from tests.opinfo import check, close, exceptions, runner, survey, worker

SHARE = 0.95
# What the pinned database holds; another version of torch has other numbers, hence "at least".
SAMPLES = {"float16": 15_600, "bfloat16": 15_400}
EVERY = 1 if helpers.FULL else 16
# Emulated: captured plans with the kernels of a GPU.
EMULATED = {"ACC_MODE": "full", "ACC_HOST_GRAPHS": "1", "ACC_TEST_EMULATOR": "1"}
WAYS = {"full": {"ACC_MODE": "full"}, "nograph": {"ACC_MODE": "nograph"}, "emulated": EMULATED}


@functools.cache
def have_formulas() -> set[str]:
    """The operators of the database that are named like one with a formula."""
    stems = {stem(name) for name in helpers.extension().operators_with_formulas()}
    return {name for name, op in worker.load_ops(runner.SOURCE).items() if names(op) & stems}


def stem(name: str) -> str:
    """The "layer_norm" of "aten::native_layer_norm_backward"."""
    base = name.partition("::")[2].partition(".")[0].strip("_").removeprefix("native_")
    return base.removesuffix("_data").removesuffix("_backward")


def names(op: OpInfo) -> set[str]:
    """What an operator of the database is called in ATen."""
    given = [op.name.rpartition(".")[2], op.name.replace(".", "_"), op.aten_name or ""]
    return {name.strip("_") for name in given + [alias.name for alias in op.aliases]}


def every_sample(way: str) -> bool:
    """Whether all of an operator's samples are run, or one."""
    return helpers.FULL and way != "emulated"


def wanted(way: str) -> list[dict[str, Any]]:
    """The requests to run in a way."""
    single = runner.requests(runner.SOURCE, [check.FUSED], [torch.float32], [])
    if way == "nograph":
        return single
    half = runner.requests(runner.SOURCE, [check.HALF], check.HALVES, [])
    if helpers.FULL:
        return [{**r, **({} if every_sample(way) else {"few": 1})} for r in half + single]
    some = set(list(dict.fromkeys(request["op"] for request in half))[::EVERY])
    chosen = [request for request in half if request["op"] in some]
    some = have_formulas()
    chosen += [request for request in single if request["op"] in some]
    return [{**request, "few": 1} for request in chosen]


@pytest.fixture(scope="module", params=WAYS if helpers.FULL else ["full", "emulated"])
def way(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def results(acc_only_module: None, way: str) -> list[runner.Result]:
    jobs = int(os.environ.get("ACC_TEST_JOBS", "1")) if helpers.FULL else 1
    env = helpers.child_env(ACC_DETERMINISTIC="1", **WAYS[way])
    return runner.run(wanted(way), jobs=jobs, env=env)


@pytest.fixture(scope="module")
def halves(results: list[runner.Result]) -> list[runner.Result]:
    found = [r for r in results if r.variant == check.HALF]
    return found or pytest.skip("half types are not run in this mode")


@pytest.fixture(scope="module")
def acc_only_module() -> None:
    if not helpers.ON_ACC:
        pytest.skip("the CPU's own results are what is compared with")


@pytest.mark.timeout(7200)
def test_within_tolerances_but_for_the_listed_exceptions(results):
    text = "\n".join(survey.by_op(results, False))
    assert not text, f"with generated kernels:\n{text}"


@pytest.mark.timeout(7200)
def test_every_operator_with_a_formula_runs_as_a_kernel(results):
    single = {r.op: r for r in results if r.variant == check.FUSED and r.op in have_formulas()}
    assert len(single) >= 100
    without = {name for name, result in single.items() if not result.fused[0]}
    listed = set(exceptions.WITHOUT_KERNEL)
    assert without <= listed if helpers.FULL else without == listed


@pytest.mark.timeout(7200)
def test_gradients_run_as_kernels(results):
    assert sum(r.fused[1] for r in results) >= 60


@pytest.mark.timeout(7200)
def test_emulated_are_kernels_of_a_gpu_in_captured_work(results, way):
    fused = sum(r.fused[0] for r in results)
    calls, submitted = (sum(r.on_a_gpu[i] for r in results) for i in range(2))
    if way != "emulated" and not helpers.on_cuda():
        assert (calls, submitted) == (0, 0)
        return
    assert calls >= fused > 0
    assert submitted >= fused or way == "nograph"


@pytest.mark.timeout(7200)
def test_kernels_are_generated_in_half_types(halves):
    assert len(halves) > 2000 / EVERY / 2
    # The others are one call of ATen's, whose result nothing is joined with, or a view. Of some of
    # these the database has a thousand samples and more (pooling), so operators are counted.
    for dtype in SAMPLES:
        found = [r for r in halves if r.dtype == dtype and r.samples]
        assert sum(r.fused[0] > 0 for r in found) >= len(found) / 3


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", SAMPLES)
def test_at_least_95_of_100_samples_pass(halves, dtype, way):
    # Those that are excepted have failed all the same.
    of_dtype = [r for r in halves if r.dtype == dtype]
    counts = survey.totals(of_dtype)
    samples, failed, _ = counts[check.HALF]
    # By default one sample of each operator that is chosen.
    assert samples >= (SAMPLES[dtype] if every_sample(way) else len(of_dtype)) > 0
    assert failed <= (1 - SHARE) * samples


@pytest.mark.timeout(7200)
def test_every_exception_is_needed(results, way):
    if not every_sample(way):
        pytest.skip("some samples need not show an exception")
    run = {r.variant for r in results}
    seen = {(r.op, r.variant, category) for r in results for _, category, _ in r.failures}
    listed = [e for e in exceptions.EXCEPTED if e.variant in run and not e.sometimes]
    stale = [
        f"{e.op} {e.variant} {e.category}"
        for e in listed
        if (e.op, e.variant, e.category) not in seen
    ]
    assert not stale, "take out of tests/opinfo/exceptions.py:\n" + "\n".join(stale)


def test_a_file_of_results_has_totals_and_what_failed_with_reasons():
    good = runner.Result("sigmoid", check.HALF, "float16", samples=3, fused=(2, 0))
    raised = [(0, "raises", "no kernel")]
    listed = runner.Result("trace", check.HALF, "float16", samples=1, failures=raised)
    new = runner.Result("add", check.HALF, "float16", samples=2, failures=[(1, "value", "far off")])
    totals, *failures = survey.lines_of([good, listed, new])
    counts = {"operators": 3, "samples": 6, "failed": 2, "excepted": 1, "with_kernels": 1}
    assert totals == {"kind": "opinfo", "variant": check.HALF, "dtype": "float16", **counts}
    assert [line["op"] for line in failures] == ["trace", "add"]
    assert "host's ATen has none" in str(failures[0]["reason"]) and failures[1]["reason"] is None


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
    found = close.CloseChecker(operator, check.HALF, dtype).check(sample, 0)
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
        assert close.CloseChecker(OnlyCuda(0), check.HALF, dtype).check(sample, 0) == []


def test_kernels_are_waited_for(acc_only, recording, monkeypatch):
    def fused(values: list[float]) -> tuple[int, int]:
        checker = close.CloseChecker(database["sigmoid"], check.FUSED, torch.float32)
        sample = SampleInput(torch.tensor(values, requires_grad=True))
        assert checker.check(sample, 0) == []
        return checker.fused, checker.fused_gradients

    database = worker.load_ops(runner.SOURCE)
    helpers.extension().skip_passes("")
    assert fused([1.0, 2.0, 3.0]) == (1, 1)
    monkeypatch.setattr(close, "RUNS_WITHOUT_KERNELS", 0)
    assert fused([1.0, 2.0, 3.0, 4.0]) == (0, 0)


@pytest.mark.parametrize("wrong_from", [1, 2, 3])
def test_what_is_wrong_with_kernels_only_is_seen(acc_only, wrong_from):
    class Late(Operator):
        calls = 0

        def op(self, x):
            if x.device.type == "cpu":
                return x * 1
            self.calls += 1
            return x * (2 if self.calls >= wrong_from else 1)

    sample = SampleInput(torch.tensor([1.0, 2.0], dtype=torch.float16))
    found = close.CloseChecker(Late(0), check.HALF, torch.float16).check(sample, 0)
    assert [kind for kind, _ in found] == ["value", "value"]  # of the result and its negation
