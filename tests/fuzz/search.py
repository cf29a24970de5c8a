"""Searches for a program whose results differ between the device and eager CPU, and shrinks it.

    ACC_EXACT=1 python -m tests.fuzz.search PROGRAMS SEED

With ACC_EXACT=1 there are half types in the programs: only then do kernels round to them after each
operator.

Programs are drawn in groups that run side by side in one graph: a kernel's compiler is what takes
the time, and the programs of a group share its runs. Each group runs four times: twice unfused, as
kernels are made for what comes twice, then fused, and fused again.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from tests import helpers
from tests.fuzz import machine
from tests.fuzz.machine import Program

GROUP = 20
ROUNDS = 4

# Of results of programs with functions, relative and absolute: functions are within 2 ULP, and what
# follows may amplify that by subtracting.
BOUNDS = (1e-4, 1e-4)

# What comes first is what programs shrink to.
_EXACT = [*machine.CONTROL, *(list(machine.PURE) * 2), *machine.VIEWS, *machine.WRITES]
_WITHIN_BOUNDS = [
    *(name for name in _EXACT if name not in machine.AMPLIFYING),
    *(list(machine.FUNCTIONS) * 2),
    *(list(machine.OPTIMIZERS) * 2),
]


def _programs(exact: bool, halves: bool) -> st.SearchStrategy[Program]:
    allowed = _EXACT if exact else _WITHIN_BOUNDS
    names = st.sampled_from([name for name in allowed if halves or name != "to half"])
    registers = st.integers(0, machine.INDICES - 1)
    instruction = st.tuples(names, registers, registers, st.integers(0, 3))
    count = len(machine.DTYPES) - (not halves)
    first = st.sampled_from([0, 0, 0, *range(count)] if exact else [0])
    return st.builds(
        Program,
        shape=st.integers(0, len(machine.SHAPES) - 1),
        dtypes=st.tuples(first, first),
        instructions=st.lists(instruction, min_size=6, max_size=30).map(tuple),
        kept=st.integers(0, 2**16 - 1),
        exact=st.just(exact),
    )


def difference(mine: Any, theirs: Any, exact: bool) -> str:
    """What differs between two results of one read, or nothing."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return "" if mine == theirs else f"{mine!r} instead of {theirs!r}"
    found = helpers.tensor_differences(mine, theirs, strides=False)
    if found and not exact and found[0][0] in ("value", "close"):
        relative, absolute = BOUNDS
        if torch.allclose(mine, theirs, rtol=relative, atol=absolute, equal_nan=True):
            return ""
    return ": ".join(found[0]) if found else ""


class Search:
    """Counts what it ran."""

    def __init__(self) -> None:
        self.programs = 0
        self.instructions = 0
        self.refused = 0
        self.results = 0

    def check(self, group: list[Program]) -> None:
        """Runs a group on both devices; raises at the first difference."""
        with torch.no_grad():
            expected = [machine.run_all([p], "cpu", lambda: None)[0] for p in group]
            for number in range(1, ROUNDS + 1):
                found = machine.run_all(group, helpers.DEVICE, helpers.flush)
                for program, mine, theirs in zip(group, found, expected, strict=True):
                    self._compare(program, mine, theirs, number)
        if failed := helpers.stats().get("jit/failed", 0):
            raise AssertionError(f"{failed} kernels could not be compiled; the reason is above")
        self.programs += len(group)
        self.instructions += sum(len(p.instructions) for p in group)
        self.results += sum(map(len, expected))
        self.refused += sum(isinstance(r, str) for results in expected for r in results)

    @staticmethod
    def _compare(program: Program, mine: list[Any], theirs: list[Any], number: int) -> None:
        texts = [f"{len(mine)} results instead of {len(theirs)}"] * (len(mine) != len(theirs))
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            text = difference(a, b, program.exact)
            texts += [f"result {i} of {len(theirs)}: {text}"] * bool(text)
        if texts:
            lines = "\n  ".join(map(str, program.instructions))
            raise AssertionError(f"run {number}: {texts[0]}\nof {program}\n  {lines}")


def search(programs: int, seed: int, halves: bool, size: int = GROUP) -> Search:
    """Runs at least so many programs; raises with the smallest one found that fails.

    `halves`: with half types, which is right only where ACC_EXACT rounds after each operator.
    `size`: how many programs run side by side.
    """
    counts = Search()
    program = st.one_of(*([_programs(True, halves)] * 4), _programs(False, halves))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=-(-programs // size),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(st.lists(program, min_size=size, max_size=size))
    def check(group: list[Program]) -> None:
        counts.check(group)

    check()
    return counts


def main() -> None:
    """The command line."""
    programs, seed = map(int, sys.argv[1:])
    halves = os.environ.get("ACC_EXACT", "0") == "1"
    helpers.load_device()
    torch.set_num_threads(1)
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    counts = search(programs, seed, halves)
    stats = helpers.stats()
    print(
        f"{counts.programs} programs of {counts.instructions} instructions, "
        f"{counts.results} results compared, {counts.refused} refusals, "
        f"{stats.get('jit/compiled', 0)} kernels, {stats.get('kernel_launches', 0)} launches, "
        f"{time.monotonic() - began:.0f} s",
    )


if __name__ == "__main__":
    main()
