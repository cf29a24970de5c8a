"""The file that a long test leaves: one JSON line per model, so that it can go on where it ended.

`ACC_TEST_RESULTS` names it. Several processes may write it at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

from benchmarks import cases, models, programs, report, trainings
from tests import helpers
from tests.models import accuracy, bench, vision, zoo

VARIABLE = "ACC_TEST_RESULTS"


def path() -> Path | None:
    """The file, or None when nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


@functools.cache
def build() -> str:
    """What tells one build of the extension, and one form of this test, from another."""
    measured_by = (accuracy, bench, cases, models, programs, trainings, vision, zoo)
    files = [Path(module.__file__) for module in measured_by]
    if helpers.ON_ACC:
        files.append(Path(helpers.extension().__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def read(file: Path) -> list[dict[str, Any]]:
    """The file's lines; none when it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def find(file: Path, model: str) -> dict[str, Any] | None:
    """What this build made of a model, if it has been measured."""
    mine = [line for line in read(file) if line["kind"] == "accuracy" and line["model"] == model]
    return next((line for line in reversed(mine) if line["build"] == build()), None)


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line, whole or not at all; a new file gets its header first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        lines = [line]
        if out.seek(0, os.SEEK_END) == 0:
            versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
            head = report.header({"suite": "accuracy", "versions": versions}, os.environ)
            lines.insert(0, head)
        out.write("".join(json.dumps(each) + "\n" for each in lines))


def measured(
    model: str,
    make: Callable[[], zoo.Case],
    optimizer: str,
    make_optimizer: zoo.MakeOptimizer,
    device: str,
) -> dict[str, Any]:
    """The line of a model: from the file, or measured and, of a full test, added to it."""
    file = path() if helpers.FULL else None
    line = find(file, model) if file else None
    if line is not None:
        return line
    began = time.monotonic()
    case = make()
    with helpers.counting() as counted:
        runs = accuracy.measure(case, make_optimizer, device)
    repeated, failures = accuracy.failures(case, make_optimizer, device, runs)
    line = {
        "kind": "accuracy",
        "model": model,
        "optimizer": optimizer,
        "input": list(case.batches[0][0].shape),
        "parameters": sum(p.numel() for p in case.model.parameters()),
        **summary(runs),
        "repeated": repeated,
        "failures": failures[:20],
        "kernel_launches": counted["kernel_launches"],
        "seconds": round(time.monotonic() - began, 1),
        "build": build(),
    }
    if file:
        append(file, line)
    return line


def summary(runs: Sequence[accuracy.Errors]) -> dict[str, Any]:
    """A model's line: how its errors stand to eager's and to what is allowed."""
    quotients, used = [], {}
    for name in runs[0]:
        mine, eager, _ = zip(*(run[name] for run in runs), strict=True)
        allowed, _ = accuracy.allowances(runs, name)
        used[name] = accuracy.mean(mine) / allowed
        if accuracy.mean(eager) > 0.0:
            quotients.append(accuracy.mean(mine) / accuracy.mean(eager))
    worst = max(used, key=lambda name: used[name])
    errors = [run[worst][0] for run in runs]
    return {
        "steps": len(runs),
        "tensors": len(used),
        "median": round(statistics.median(quotients), 3),
        "worst": round(used[worst], 3),
        "worst_of": worst,
        # Mostly one step decides: where an optimizer begins, or where a kink is met.
        "worst_step": errors.index(max(errors)) + 1,
        "over": sum(share > 1.0 for share in used.values()),
    }
