"""Runs programs in this process and appends their results to a file, one pickle per program.

    python -m tests.programs.batch DEVICE FILE ROUNDS NAME ...

Each program is run ROUNDS times in a row: the plans of the first round are repeated in the others.
Tensors are brought to the CPU; dtype, shape, strides, offset and requires_grad are kept beside
their values. A program that raises leaves its exception. The parent sees from the file which
program a crash was in.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import helpers


@dataclass
class Frozen:
    """A tensor as a program returned it."""

    values: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    device: str


@dataclass
class Finished:
    """What came of one program."""

    name: str
    result: Any = None  # of the last round
    error: str = ""
    earlier: list[Any] = field(default_factory=list)  # the results of the rounds before it
    launches: int = 0  # of generated kernels in the last round
    captured: int = 0  # plans that were submitted as captured work in the last round


def freeze(leaf: Any) -> Any:
    """A value that can be pickled and compared without the device."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, (int, float, bool, str, type(None), complex)) else str(leaf)
    strided = leaf.layout == torch.strided
    values = leaf.detach().cpu().resolve_conj().resolve_neg()
    return Frozen(
        values=values.contiguous().clone() if strided else values,
        dtype=str(leaf.dtype),
        shape=tuple(leaf.shape),
        stride=tuple(leaf.stride()) if strided else (),
        offset=leaf.storage_offset() if strided else 0,
        requires_grad=leaf.requires_grad,
        device=leaf.device.type,
    )


def run_program(name: str, device: str, rounds: int = 1) -> Finished:
    """Runs one program; never raises what the program raises."""
    module = importlib.import_module(f"tests.programs.scripts.{name}")
    results: list[Any] = []
    refused = _counted(device, "jit/failed")
    try:
        for _ in range(rounds):
            torch.manual_seed(0)
            random.seed(0)
            before = _counted(device, "kernel_launches", "captures_submitted")
            results.append(helpers.tree_map(freeze, module.run(device)))
        after = _counted(device, "kernel_launches", "captures_submitted")
        launches, captured = (b - a for a, b in zip(before, after, strict=True))
        assert _counted(device, "jit/failed") == refused, "kernels could not be compiled"
        return Finished(name, results.pop(), "", results, launches, captured)
    except Exception:  # a finding, told by the parent
        where = f"in round {len(results) + 1}:\n" if results else ""
        return Finished(name, error=where + traceback.format_exc(limit=-4))


def _counted(device: str, *names: str) -> list[int]:
    counters = helpers.stats() if device != "cpu" else {}
    return [counters.get(name, 0) for name in names]


def main() -> None:
    """The command line."""
    device, path, rounds, *names = sys.argv[1:]
    if device != "cpu":
        helpers.load_device()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(path, "ab", buffering=0) as file:
        for name in names:
            file.write(pickle.dumps(Finished(name, error="started")))
            finished = run_program(name, device, int(rounds))
            file.write(pickle.dumps(finished))
            if finished.error and device != "cpu" and helpers.device_is_lost():
                os._exit(0)  # the parent has another process for the programs that are left


if __name__ == "__main__":
    # Through the module's own name, so that the parent can unpickle its classes.
    from tests.programs import batch

    batch.main()
