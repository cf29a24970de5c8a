"""The kernels that the tests before made compile for GPUs, without a fault.

But for those of random programs, which are others in each run. The library leaves the texts in
`ACC_KERNEL_TEXTS`, which `scripts/run_tests.py` empties before it begins. All of them for all
architectures are the better part of an hour, for `make test-full`: else every sixth is compiled for
one, which the hash in its name decides. Those of some training steps are tests of their own
(tests/python/test_cuda_kernels.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers, nvidia

pytestmark = pytest.mark.usefixtures("acc_only")

DIRECTORY = os.environ.get("ACC_KERNEL_TEXTS", "")
PATHS = sorted(Path(DIRECTORY).glob("acc_*.cu")) if DIRECTORY else []
TOGETHER = 48  # kernels of a program
EVERY = 6


def programs() -> list[Any]:
    """An architecture and some kernels each."""
    made = []
    for index, architecture in enumerate(nvidia.ARCHITECTURES):
        every = len(nvidia.ARCHITECTURES) * EVERY
        paths = [path for path in PATHS if helpers.FULL or int(path.stem[-8:], 16) % every == index]
        for first in range(0, len(paths), TOGETHER):
            some = paths[first : first + TOGETHER]
            made.append(pytest.param(architecture, some, id=f"{architecture}-{first}"))
    return made


@pytest.mark.parametrize("architecture, paths", programs())
def test_kernels_have_no_faults(architecture, paths, tmp_path):
    x = torch.ones(5, device=helpers.DEVICE)
    kernels = nvidia.kernels_of(lambda: x * x + 1)._replace(texts=[p.read_text() for p in paths])
    # Loads are not counted: of a tensor that stays as it is, -(-x) in place, nothing is read.
    faults = nvidia.faults(nvidia.make(kernels, architecture, tmp_path, loads=False))
    assert not faults, f"of {DIRECTORY}:\n" + "\n".join(faults)


def test_kernels_were_kept():
    """Those of tests/programs alone are nearly three hundred."""
    if not DIRECTORY:
        pytest.skip("scripts/run_tests.py says where kernels are kept")
    assert len(PATHS) >= 200, f"{DIRECTORY} has {len(PATHS)}: run the stages that make kernels"
