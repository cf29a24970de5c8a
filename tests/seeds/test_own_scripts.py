"""Our own scripts, with the same calls as the documents', run to the end with eager's numbers."""

from __future__ import annotations

import pytest

from tests.seeds.scripts import HERE, Run, assert_ran_on, assert_same_numbers, run_script, steps

BATCH, EVERY = 8, 10


@pytest.fixture(scope="module")
def own_reference() -> Run:
    return run_script(HERE / "own_native.py", "cpu", eager=True)


@pytest.fixture(scope="module")
def own_accelerated(own_reference) -> Run:
    return run_script(HERE / "own_accelerate.py")


def test_our_accelerated_script(device, own_accelerated, own_reference):
    assert_ran_on(own_accelerated, device)
    assert own_accelerated.report["loader"] == "AsyncLoader"
    assert steps(own_accelerated) == [(e, s) for e in range(2) for s in (10, 20, 30)]
    assert_same_numbers(own_accelerated, own_reference)


def test_our_native_script(device, own_reference):
    run = run_script(HERE / "own_native.py", device)
    assert_ran_on(run, device)
    assert_same_numbers(run, own_reference)


@pytest.mark.parametrize("script", ["own_accelerate", "own_amp"])
def test_the_printed_throughput_is_the_true_one(device, own_accelerated, script):
    """With several steps in flight the line would show how fast steps are recorded, not run."""
    run = own_accelerated if script == "own_accelerate" else run_script(HERE / f"{script}.py")
    for epoch in {line.epoch for line in run.lines}:
        lines = [line for line in run.lines if line.epoch == epoch]
        # The first window holds the start of the workers.
        samples = BATCH * EVERY * (len(lines) - 1)
        true = samples / (lines[-1].time - lines[0].time)
        printed = (len(lines) - 1) / sum(1 / line.rate for line in lines[1:])
        assert abs(printed / true - 1) <= 0.05, (epoch, printed, true)
