"""The kernels that the tests before made compile for GPUs, without a fault.

But for those of random programs, which are others in each run. The library leaves the texts in
`ACC_KERNEL_TEXTS`, which `scripts/run_tests.py` empties before it begins. All of them for all
architectures are the better part of an hour, for `make test-full`: else each is for one, and every
second is compiled to the end, the others only translated. The hash in its name and that of the
revision decide which, so that all of them have their turn.
Those of some training steps are tests of their own (tests/python/test_cuda_kernels.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers, nvidia

pytestmark = pytest.mark.usefixtures("acc_only")

DIRECTORY = os.environ.get("ACC_KERNEL_TEXTS", "")
PATHS = sorted(Path(DIRECTORY).glob("acc_*.cu")) if DIRECTORY else []
TOGETHER = 48  # kernels of a program
EVERY = 2


def revision() -> int:
    """The first digits of this revision's hash; 0 outside of a checkout."""
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(asked, cwd=helpers.ROOT, capture_output=True, text=True, check=False)
    return int(found.stdout or "0", 16)


TURN = 0 if helpers.FULL else revision()


def number(path: Path) -> int:
    """A kernel's, by the hash of its text."""
    return int(path.stem[-8:], 16)


def programs(turns: range) -> list[Any]:
    """An architecture and some kernels each: those whose turn it is."""
    made = []
    for index, architecture in enumerate(nvidia.ARCHITECTURES):
        chosen = [index + len(nvidia.ARCHITECTURES) * turn for turn in turns]
        every = len(nvidia.ARCHITECTURES) * EVERY
        paths = [p for p in PATHS if helpers.FULL or (number(p) + TURN) % every in chosen]
        for first in range(0, len(paths), TOGETHER):
            some = paths[first : first + TOGETHER]
            made.append(pytest.param(architecture, some, id=f"{architecture}-{first}"))
    return made


TO_THE_END = programs(range(1))
TRANSLATED = [] if helpers.FULL else programs(range(1, EVERY))


def kernels_of(paths: list[Path]) -> nvidia.Kernels:
    """Their texts, with what stands before those of any step."""
    x = torch.ones(5, device=helpers.DEVICE)
    texts = [path.read_text() for path in paths]
    return nvidia.kernels_of(lambda: x * x + 1)._replace(texts=texts)


@pytest.mark.parametrize("architecture, paths", TO_THE_END)
def test_kernels_have_no_faults(architecture, paths, tmp_path):
    faults = nvidia.faults(nvidia.make(kernels_of(paths), architecture, tmp_path))
    assert not faults, f"of {DIRECTORY}:\n" + "\n".join(faults)


@pytest.mark.parametrize("architecture, paths", TRANSLATED)
def test_the_others_are_translated(architecture, paths, tmp_path):
    nvidia.translate(kernels_of(paths), architecture, tmp_path)


def test_kernels_were_kept():
    """Those of tests/programs alone are nearly three hundred."""
    if not DIRECTORY:
        pytest.skip("scripts/run_tests.py says where kernels are kept")
    assert len(PATHS) >= 200, f"{DIRECTORY} has {len(PATHS)}: run the stages that make kernels"


def test_each_kernel_is_compiled():
    taken = [path for program in (*TO_THE_END, *TRANSLATED) for path in program.values[1]]
    assert sorted(taken) == sorted(PATHS * (len(nvidia.ARCHITECTURES) if helpers.FULL else 1))
