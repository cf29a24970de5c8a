"""Every program of `scripts/` gives on the device under test what it gives on the CPU, bit by bit.

The programs of one mode run in one child process, because the mode is chosen when the device
starts. A program that ends the process fails alone: the others run on in a new one.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import helpers
from tests.programs.batch import Finished, Frozen

NAMES = sorted(p.stem for p in (Path(__file__).parent / "scripts").glob("[a-z]*.py"))
# For the two modes that are the same as others today: views, autograd, training and a host read.
SMOKE = ["view_chain_write", "double_backward", "train_adamw", "losses_kept_in_list"]

# Programs whose bits may differ from the CPU's, with the operator that causes it. Their results
# are compared to 1e-5 relative.
CLOSE: dict[str, str] = {}


def _batch(device: str, names: list[str], folder: Path, **env: str | None) -> dict[str, Finished]:
    """Runs programs in child processes until each has a result."""
    found: dict[str, Finished] = {}
    left = list(names)
    while left:
        path = folder / f"{device}-{env.get('ACC_MODE')}-{len(left)}.pickle"
        command = [sys.executable, "-m", "tests.programs.batch", device, str(path), *left]
        last_words = ""
        try:
            done = subprocess.run(
                command,
                cwd=helpers.ROOT,
                env=helpers.child_env(**env),
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            status, last_words = f"status {done.returncode}", done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            status = "no end after 240 s"
        started = ""
        if path.exists():
            with open(path, "rb") as file:
                while True:
                    try:
                        entry = pickle.load(file)
                    except EOFError:
                        break
                    started = entry.name
                    found[entry.name] = entry
        before = len(left)
        left = [name for name in left if name not in found]
        if started and found[started].error == "started":
            found[started].error = f"the process ended ({status}) in this program\n{last_words}"
        elif not left and status != "status 0":
            raise AssertionError(f"every program ran, then: {status}\n{last_words}")
        elif left and len(left) == before:
            raise AssertionError(f"no program could be run ({status})\n{last_words}")
    return found


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> dict[str, Finished]:
    """The results on the CPU, in a process where no device is registered."""
    folder = tmp_path_factory.mktemp("programs")
    return _batch("cpu", NAMES, folder, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.fixture(scope="module")
def on_device(tmp_path_factory) -> dict[str, dict[str, Finished]]:
    """The results on the device under test by mode; each mode is run when first asked for."""
    folder = tmp_path_factory.mktemp("programs")

    class Modes(dict[str, dict[str, Finished]]):
        def __missing__(self, mode: str) -> dict[str, Finished]:
            names = NAMES if mode in helpers.MODES else SMOKE
            self[mode] = _batch(helpers.DEVICE, names, folder, ACC_MODE=mode)
            return self[mode]

    return Modes()


def _difference(mine: object, theirs: object, close: bool) -> str:
    if type(mine) is not type(theirs):
        return f"{type(mine).__name__} instead of {type(theirs).__name__}"
    if not isinstance(theirs, Frozen) or not isinstance(mine, Frozen):
        same = mine == theirs or (mine != mine and theirs != theirs)
        return "" if same else f"{mine!r} instead of {theirs!r}"
    if mine.device != helpers.DEVICE and theirs.device != mine.device:
        return f"the tensor is on {mine.device}"
    for name in ("dtype", "shape", "stride", "offset", "requires_grad"):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name} {getattr(mine, name)} instead of {getattr(theirs, name)}"
    if mine.values.layout != torch.strided:
        found = helpers.tensor_differences(mine.values, theirs.values)
        return str(found[0]) if found else ""
    difference = helpers.value_difference(mine.values, theirs.values)
    if difference is None or (close and difference[0] == "close"):
        return ""
    return difference[1]


def _compare(mine: Finished, theirs: Finished) -> None:
    assert not theirs.error, f"the program fails on the CPU:\n{theirs.error}"
    assert not mine.error, mine.error
    a, b = helpers.leaves(mine.result), helpers.leaves(theirs.result)
    assert len(a) == len(b), f"{len(a)} results instead of {len(b)}"
    lines = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        text = _difference(x, y, close=mine.name in CLOSE)
        if text:
            lines.append(f"  result {i}: {text}")
    assert not lines, "differs from the CPU:\n" + "\n".join(lines)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_program(on_cpu, on_device, device, name, mode):
    _compare(on_device[mode][name], on_cpu[name])


@pytest.mark.parametrize("mode", helpers.SMOKE_MODES)
@pytest.mark.parametrize("name", SMOKE)
def test_smoke_of_the_other_modes(on_cpu, on_device, device, name, mode):
    _compare(on_device[mode][name], on_cpu[name])


def test_there_are_enough_programs():
    assert len(NAMES) >= 60


def test_exceptions_are_programs_and_needed(on_cpu, on_device, device):
    assert set(CLOSE) <= set(NAMES)
    if not helpers.ON_ACC:
        return
    for name in CLOSE:
        pairs = [
            pair
            for mode in helpers.MODES
            for pair in zip(
                helpers.leaves(on_device[mode][name].result),
                helpers.leaves(on_cpu[name].result),
                strict=True,
            )
        ]
        assert any(_difference(x, y, close=False) for x, y in pairs), f"{name} is bit-equal"
