"""Programs of one process that take turns, for what is compared step by step."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.programs import Program

WARM_STEPS, ROUNDS, STEPS = 6, 11, 3


def parser(name: str, description: str, cases: Iterable[str]) -> argparse.ArgumentParser:
    """Of a command line with cases, threads and a file for the results."""
    made = argparse.ArgumentParser(prog=name, description=description)
    made.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--json", type=Path)
    return made


def measured(programs: Mapping[str, Program]) -> dict[str, list[float]]:
    """Milliseconds per step of each program on acc, round by round."""
    import torch

    for program in programs.values():
        for index in range(WARM_STEPS):
            program.step(index)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            torch.acc.synchronize()
            start = time.perf_counter()
            for index in range(STEPS):
                program.step(index, read=False)
            torch.acc.synchronize()
            times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    return times


def compared(times: Mapping[str, list[float]], first: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Per program its median, and its ratio to the `first` one in neighbouring rounds.

    With the ratio's 95 % interval `low` to `high`.
    """
    from benchmarks import stats

    for name, taken in times.items():
        ratios = [ms / other for ms, other in zip(taken, times[first], strict=True)]
        ratio = stats.speedup(ratios, [1.0] * len(ratios))
        found = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        yield name, {"median_ms": stats.median(taken), **found}


def header(suite: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The first line of a file of results."""
    import torch

    from benchmarks import report

    settings = {
        "suite": suite,
        "cases": list(arguments.cases),
        "threads": arguments.threads,
        "alternations": ROUNDS,
        "torch": torch.__version__,
    }
    return report.header(settings, os.environ)


def write(lines: Iterable[Mapping[str, Any]], file: Path | None) -> None:
    """As JSON lines, if a file was asked for."""
    if file is not None:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
