"""Thousands of random programs a run; the seed of each run is printed and can be given.

    ACC_TEST_FUZZ_SEED=123 python scripts/run_tests.py fuzz

A failure prints the smallest program found and the command that finds it again.
"""

from __future__ import annotations

import os
import random
import re

import pytest
import torch

from tests import helpers
from tests.fuzz import machine, search, trainings
from tests.fuzz.machine import Program

# At least 5,000 in a run; with ACC_TEST_FULL a hundred thousand.
SHARES = {"exact": 0.6, "default": 0.4}
PROGRAMS = 100_000 if helpers.FULL else 5_200
SECONDS = 9000 if helpers.FULL else 900


@pytest.mark.parametrize("rounding", SHARES)
def test_random_programs(acc_only, tmp_path, capsys, rounding):
    """Kernels of a run are its own: none comes from the disk."""
    seed = int(os.environ.get("ACC_TEST_FUZZ_SEED", random.SystemRandom().randrange(10**6)))
    count = round(PROGRAMS * SHARES[rounding])
    exact = str(int(rounding == "exact"))
    tmp_path.chmod(0o700)
    code = (
        f"import sys\nsys.argv = ['search', '{count}', '{seed}']\n"
        "from tests.fuzz import search\nsearch.main()\n"
    )
    done = helpers.run_python(
        code,
        timeout=SECONDS,
        check=False,
        ACC_EXACT=exact,
        ACC_CACHE_DIR=str(tmp_path),
        ACC_MODE="full",
        ACC_SKIP_PASSES=None,
    )
    with capsys.disabled():
        print(f"\n{rounding}: {' '.join(done.stdout.split())}", end=" ", flush=True)
    if done.returncode != 0:
        again = f"ACC_EXACT={exact} python -m tests.fuzz.search {count} {seed}"
        pytest.fail(f"again: {again}\n{done.stdout[-500:]}\n{done.stderr[-6000:]}")
    programs, launches = (
        int(re.search(rf"(\d+) {what}", done.stdout)[1]) for what in ("programs", "launches")
    )
    assert programs >= count
    assert launches >= programs, "hardly any program was fused"


# Training programs in a run, by what is captured: operators, those of which some are refused, and
# kernels, of which each has to be compiled.
TRAININGS = {"operators": 400, "operators refused": 200, "kernels": 8, "gpu": 4}


@pytest.mark.parametrize("what", TRAININGS)
def test_random_trainings(acc_only, capturing, tmp_path, capsys, what):
    if helpers.extension().executor_name() != "host":
        pytest.skip("allocations that fail and captures that are refused are those of the host")
    seed = int(os.environ.get("ACC_TEST_FUZZ_SEED", random.SystemRandom().randrange(10**6)))
    count = TRAININGS[what] * (20 if helpers.FULL else 1)
    tmp_path.chmod(0o700)
    code = (
        f"import sys\nsys.argv = ['trainings', '{count}', '{seed}', *'{what}'.split()]\n"
        "from tests.fuzz import trainings\ntrainings.main()\n"
    )
    env = {"ACC_MODE": "full", "ACC_SKIP_PASSES": None, "ACC_CACHE_DIR": str(tmp_path)}
    done = helpers.run_python(code, timeout=SECONDS, check=False, **env)
    with capsys.disabled():
        print(f"\n{what}, seed {seed}: {done.stdout.strip()}", end=" ", flush=True)
    if done.returncode != 0:
        again = f"python -m tests.fuzz.trainings {count} {seed} {what}"
        pytest.fail(f"again: {again}\n{done.stdout[-500:]}\n{done.stderr[-6000:]}")
    programs, captures, submits = map(int, re.findall(r"(\d+) [a-z]", done.stdout))
    assert programs == count
    assert captures >= programs and submits >= programs


def test_a_wrong_training_is_found_and_shrunk(acc_only, monkeypatch):
    """Averages that are wrong on the device, from the third on."""
    right = trainings.Run.average

    def wrong(run: trainings.Run, which: int, k: int) -> None:
        run.averaged = getattr(run, "averaged", 0) + 1
        right(run, which, k + (run.averaged == 3 and run.device == acc_only))

    monkeypatch.setattr(trainings.Run, "average", wrong)
    with pytest.raises(AssertionError, match=r"seed \d+: result") as caught:
        trainings.search(100, 1)
    assert re.findall(r"^\('(.*?)'", str(caught.value), re.MULTILINE).count("average") == 3


def _reads(name: str, dtype: int, k: int) -> list[object]:
    instructions = ((name, 0, 1, k),) if name else ()
    program = Program(0, (dtype, dtype), instructions, 2**16 - 1, True)
    return machine.run_all([program], "cpu", lambda: None)[0]


@pytest.mark.parametrize("name", machine.TABLE)
def test_every_instruction_does_something(name):
    """Each changes what a program reads, for some type and number."""
    for dtype in range(3):
        for k in range(4):
            mine, theirs = _reads(name, dtype, k), _reads("", dtype, k)
            if len(mine) != len(theirs):
                return
            if any(search.difference(a, b, True) for a, b in zip(mine, theirs, strict=True)):
                return
    pytest.fail("it does nothing")


def test_a_wrong_operator_is_found_and_shrunk(acc_only, unfused, monkeypatch):
    """A sum that is wrong on the device in rows of 9 only."""

    def wrong(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
        return a + (1 if a.device.type == acc_only and a.shape[:1] == (9,) else 0)

    monkeypatch.setitem(machine.TABLE, "abs", wrong)
    with pytest.raises(AssertionError) as caught:
        search.search(800, 1, halves=False, size=1)
    text = str(caught.value)
    instructions = re.findall(r"^  \('(.*?)'", text, re.MULTILINE)
    assert instructions.count("abs") == 1, text
    # Programs shrink to what stands first in the tables.
    assert set(instructions) <= {"abs", next(iter(machine.PURE)), *machine.CONTROL}, text
    assert "shape=2" in text


def test_differences_are_seen():
    a = torch.arange(4.0)
    assert not search.difference(a, a.clone(), True)
    assert search.difference(a, a + torch.tensor([0, 0, 0, 1e-6]), True)
    assert not search.difference(a, a + torch.tensor([0, 0, 0, 1e-6]), False)
    assert search.difference(a, a + torch.tensor([0, 0, 0, 1e-2]), False)
    assert search.difference((1,), (2,), False)
    assert search.difference("RuntimeError", a, False)


def test_hypothesis_repeats_a_seed():
    """Twice the same seed draws the same programs."""
    drawn: list[list[str]] = []
    for _ in range(2):
        seen: list[str] = []

        class Recorder(search.Search):
            def check(self, group, seen=seen):
                seen.extend(map(repr, group))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "Search", Recorder)
            search.search(60, 7, halves=True)
        drawn.append(seen)
    assert drawn[0] == drawn[1] and len(drawn[0]) >= 60
