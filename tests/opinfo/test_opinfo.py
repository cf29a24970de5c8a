"""PyTorch's operator database on the device under test, compared with the CPU.

float32 in mode full, and of each operator the first samples in mode eager; with `ACC_TEST_FULL=1`
or `pytest --full` every sample and dtype, second gradients, and gradients in mode eager; with the
former float32 in the other two modes too. Without generated kernels, which `test_close.py` is for.
`survey.py` runs the same and groups what fails.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path

import pytest
import torch

from tests import helpers
from tests.opinfo import check, exceptions, runner, survey, worker

# What the pinned database holds; another version of torch has other numbers, hence "at least".
FORWARD_SAMPLES = 18_368
GRADIENT_SAMPLES = 13_729
SHARE = 0.995
SHARED = (
    check.FORWARD,
    check.GRADIENT,
    check.INPLACE,
    check.VIEW,
    check.INPLACE_VIEW,
    check.CHANNELS_LAST,
)
JOBS = int(os.environ.get("ACC_TEST_JOBS", "1"))

# In the other modes autograd calls the same operators.
SOME = [check.FORWARD, check.INPLACE, check.INPLACE_VIEW]
MODES = {"full": list(check.VARIANTS), "eager": SOME}
EAGER_SAMPLES = 8  # of an operator: what it does with others is its own kernel, as in mode full
if helpers.FULL:
    MODES.update({mode: [*SOME, check.GRADIENT] for mode in ("eager", "nofuse", "nograph")})


def _run(mode: str, full: bool) -> list[runner.Result]:
    variants = [*MODES[mode], check.DOUBLE] if full and mode == "full" else MODES[mode]
    dtypes = None if full and mode in ("full", "eager") else [torch.float32]
    wanted = runner.requests(runner.SOURCE, variants, dtypes, [])
    if mode == "eager" and not full:
        wanted = [{"limit": EAGER_SAMPLES, **request} for request in wanted]
    return runner.run(
        wanted, jobs=JOBS, env=helpers.child_env(ACC_MODE=mode, ACC_SKIP_PASSES=helpers.BIT_BY_BIT)
    )


@pytest.fixture(scope="session")
def surveys(tmp_path_factory, request) -> dict[str, list[runner.Result]]:
    """The results by mode. Run once, also when several pytest workers ask for them."""
    if helpers.ON_ACC:
        helpers.load_device()
    full = helpers.FULL or request.config.getoption("--full", default=False)
    folder: Path = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    file = folder / "opinfo.json"
    with open(folder / "opinfo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = {m: [dataclasses.asdict(r) for r in _run(m, full)] for m in MODES}
            file.write_text(json.dumps(made))
    return {
        mode: [
            runner.Result(**{**r, "failures": [tuple(f) for f in r["failures"]]}) for r in results
        ]
        for mode, results in json.loads(file.read_text()).items()
    }


def _failures(results: list[runner.Result], everything: bool = False) -> str:
    lines = survey.by_op(results, everything)
    shown = "\n".join(lines[:60])
    return shown + (f"\n... and {len(lines) - 60} more lines" if len(lines) > 60 else "")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_crashes_or_hangs(surveys, mode):
    lines = [
        f"{r.op} {r.variant} {r.dtype} #{index}: {category}: {text}"
        for r in surveys[mode]
        for index, category, text in r.failures
        if category in ("crash", "hang")
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "variant"), [(mode, v) for mode, variants in MODES.items() for v in variants]
)
def test_equal_to_the_cpu_but_for_the_listed_exceptions(surveys, mode, variant):
    chosen = [r for r in surveys[mode] if r.variant == variant]
    assert chosen, "no operator was run"
    text = _failures(chosen)
    assert not text, f"{variant}, mode {mode}:\n{text}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES if helpers.FULL else ["full"])
def test_every_sample_of_the_database_is_run(surveys, mode):
    counts = survey.totals([r for r in surveys[mode] if r.dtype == "float32"])
    assert counts[check.FORWARD][0] >= FORWARD_SAMPLES
    if check.GRADIENT in MODES[mode]:
        assert counts[check.GRADIENT][0] >= GRADIENT_SAMPLES
    unmade = [f"{r.op} {r.variant} {r.dtype}" for r in surveys[mode] if r.unmade]
    assert not unmade, f"the database could not make samples for {unmade}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES if helpers.FULL else ["full"])
def test_at_least_995_of_1000_samples_pass(surveys, mode):
    # Those that are excepted have failed all the same.
    results = [r for r in surveys[mode] if r.dtype == "float32"]
    for variant, (samples, failed, _) in survey.totals(results).items():
        if variant in SHARED:
            assert failed <= (1 - SHARE) * samples, f"{variant}: {failed} of {samples} failed"


@pytest.mark.timeout(3600)
def test_every_exception_is_needed(surveys):
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: it needs no exceptions")
    seen = {
        (r.op, r.variant, category, r.dtype)
        for results in surveys.values()
        for r in results
        for _, category, _ in r.failures
    }
    run = {(r.op, r.variant, r.dtype) for results in surveys.values() for r in results}
    variants = {variant for _, variant, _ in run}
    stale = []
    for e in exceptions.EXCEPTED:
        if e.variant not in variants or (e.on_host and helpers.on_cuda()):
            continue
        covered = [
            d
            for op, v, d in run
            if (op, v) == (e.op, e.variant) and (not e.dtypes or d in e.dtypes)
        ]
        if not covered and not e.dtypes:
            stale.append(f"{e.op} {e.variant}: no such operator or variant")
        needed = any((e.op, e.variant, e.category, d) in seen for d in covered)
        if covered and not needed and not e.sometimes:
            stale.append(f"{e.op} {e.variant} {e.category}: no longer fails")
    assert not stale, "take out of tests/opinfo/exceptions.py:\n" + "\n".join(stale)


@pytest.mark.timeout(3600)
def test_the_list_of_random_operators_is_right(surveys):
    drew = {r.op for r in surveys["full"] if r.random and r.dtype == "float32"}
    assert drew == set(exceptions.RANDOM)


def test_lists_name_operators_of_the_database():
    known = set(worker.load_ops(runner.SOURCE))
    for table in (
        exceptions.UNINITIALISED,
        exceptions.CPU_ARGUMENTS,
        exceptions.DRAWS_CHANNELS,
        exceptions.RUN_AT_ONCE,
        exceptions.METADATA_ONLY,
        exceptions.WITHOUT_KERNEL,
    ):
        assert set(table) <= known
