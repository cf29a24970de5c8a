"""Runs a script in a process of its own, and reads what it printed."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import helpers
from tests.seeds import extract

HERE = Path(__file__).resolve().parent
LINE = re.compile(r"^Epoch: (\d+), Step: (\d+), Loss: (\d+\.\d{4}), Throughputs: (\d+\.\d{4})")


@functools.cache
def text_of(number: str) -> str:
    """The text of a document; the test is skipped where the documents are not."""
    text = extract.document(number)
    if text is None:
        pytest.skip(
            f"no document {number} in {extract.folder()}; set ACC_SEEDS_DIR to their folder"
        )
    return text


@dataclass(frozen=True)
class Printed:
    """One line that a script printed, and the time at which it did (seconds)."""

    epoch: int
    step: int
    loss: float
    rate: float
    time: float


@dataclass(frozen=True)
class Run:
    """What a script printed, and the driver's report on it."""

    lines: tuple[Printed, ...]
    report: dict


def run_script(script: Path, *arguments: str, eager: bool = False, by: tuple[str, ...] = ()) -> Run:
    """`by`: what runs the driver, as in `python -m torchacc run driver.py script`."""
    # A network of fifty layers trains apart from eager's last bits within a few steps.
    changes: dict[str, str | None] = {
        "ACC_TEST_REGISTER": None if eager else "1",
        "ACC_SKIP_PASSES": helpers.BIT_BY_BIT,
    }
    if eager:
        changes |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *by, str(HERE / "driver.py"), str(script), *arguments],
        cwd=script.parent,
        env=helpers.child_env(**changes),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    *text, last = done.stdout.splitlines()
    assert last.startswith("REPORT "), last
    report = json.loads(last.removeprefix("REPORT "))
    assert len(text) == len(report["printed"])
    lines = []
    for line, time in zip(text, report["printed"], strict=True):
        match = LINE.match(line)
        assert match, f"not a line that these scripts print: {line!r}"
        lines.append(Printed(int(match[1]), int(match[2]), float(match[3]), float(match[4]), time))
    return Run(tuple(lines), report)


def steps(run: Run) -> list[tuple[int, int]]:
    return [(line.epoch, line.step) for line in run.lines]


def assert_ran_on(run: Run, device: str) -> None:
    assert run.report["device"].startswith(device)
    assert [name.split(":")[0] for name in run.report["parameters"]] == [device]
    assert run.report["gradients"]


def assert_same_numbers(run: Run, reference: Run) -> None:
    assert [line.loss for line in run.lines] == [line.loss for line in reference.lines]
    assert run.report["norm"] == reference.report["norm"]
