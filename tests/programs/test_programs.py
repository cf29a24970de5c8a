"""Every program of `scripts/` gives on the device under test what it gives on the CPU.

Bit by bit without generated kernels. With them every program is run four times, so that its plans
come again and are fused; every round must give what the CPU gives, floating point within bounds.

The programs of one mode run in one child process, because the mode is chosen when the device
starts. A program that ends the process fails alone: the others run on in a new one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers
from tests.programs.batch import Finished, Frozen

NAMES = sorted(p.stem for p in (Path(__file__).parent / "scripts").glob("[a-z]*.py"))

# Programs with an error that depends on data: on a GPU it ends the CUDA context.
WRONG_DATA = {"index_error_in_step"}

# The ways in which plans that come again are run, and how often a program runs there: kernels are
# made for what comes twice, and the first round may differ from the others in what it finds (lazily
# made states, caches). Captured plans run as they do on a GPU, as work with fixed memory; emulated
# ones with the kernels of a GPU, too.
CAPTURED = {"ACC_MODE": "full", "ACC_HOST_GRAPHS": "1", "ACC_DETERMINISTIC": "1"}
FUSED = {
    "full": {"ACC_MODE": "full"},
    "nograph": {"ACC_MODE": "nograph"},
    "captured": CAPTURED,
    "emulated": {**CAPTURED, "ACC_TEST_EMULATOR": "1"},
}
REPEATED = {"nofuse": {"ACC_MODE": "nofuse"}, **FUSED}
ROUNDS = {"nofuse": 3, "full": 4, "nograph": 4, "captured": 6, "emulated": 6}

# Seconds for all programs of a mode: compilers of some hundred kernels on a busy machine.
TIMEOUT = 900

# How far a float may be from the CPU's where kernels are generated, relative and absolute. They
# round each operator as the CPU does, but functions are within 2 ULP and sums that follow amplify.
# Half types: kernels keep float32 between operators where the CPU rounds after each, so a result
# is off by several roundings (2^-8 and 2^-11 of the value).
BOUNDS: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-13),
    torch.complex128: (1e-12, 1e-13),
    torch.float32: (1e-5, 1e-6),
    torch.complex64: (1e-5, 1e-6),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
}


# Programs whose float32 results may be further away, absolutely: they are small differences of sums
# that both sides round, in different orders.
AMPLIFIED = {
    "batch_norm_2d_backward": 3e-5,  # gradients behind a normalisation are zero but for rounding
    "transformer_layer": 1e-5,
    "train_lbfgs": 2e-4,  # divides by differences of gradients
}


def _batch(
    device: str, names: list[str], folder: Path, rounds: int = 1, **env: str | None
) -> dict[str, Finished]:
    """Runs programs in child processes until each has a result."""
    found: dict[str, Finished] = {}
    left = list(names)
    while left:
        path = folder / f"{device}-{env.get('ACC_MODE')}-{rounds}-{len(left)}.pickle"
        batch = ("tests.programs.batch", device, str(path), str(rounds))
        command = [sys.executable, "-m", *batch, *left]
        last_words = ""
        try:
            done = subprocess.run(
                command,
                cwd=helpers.ROOT,
                env=helpers.child_env(**env),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
            status, last_words = f"status {done.returncode}", done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            status = f"no end after {TIMEOUT} s"
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


def _run(names: Iterable[str] = NAMES) -> list[str]:
    """Those of the programs that the device under test runs."""
    return [name for name in names if name not in WRONG_DATA or not helpers.on_cuda()]


def _asked(items: Iterable[Any]) -> list[str]:
    """The programs that tests are about. A few that are chosen (-k) take seconds; those of how many
    were fused are about all.
    """
    mine = [
        item.callspec.params
        for item in items
        if item.module.__name__ == __name__ and hasattr(item, "callspec")
    ]
    names = {params.get("name") for params in mine}
    return [name for name in NAMES if name in names or None in names]


def _found(batch: dict[str, Finished], name: str) -> Finished:
    if name in WRONG_DATA and helpers.on_cuda():
        pytest.skip("wrong data end the CUDA context of the process")
    return batch[name]


@pytest.fixture(scope="module")
def asked(request) -> list[str]:
    return _asked(request.session.items)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory, asked) -> dict[str, Finished]:
    """The results on the CPU, in a process where no device is registered."""
    folder = tmp_path_factory.mktemp("programs")
    return _batch("cpu", asked, folder, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.fixture(scope="module")
def on_device(tmp_path_factory, asked) -> dict[str, dict[str, Finished]]:
    """The results without generated kernels by mode; each mode is run when first asked for."""

    class Modes(dict[str, dict[str, Finished]]):
        def __missing__(self, mode: str) -> dict[str, Finished]:
            folder = _begin(tmp_path_factory, f"{mode}-unfused")
            env = {"ACC_MODE": mode, "ACC_SKIP_PASSES": helpers.BIT_BY_BIT}
            self[mode] = _batch(helpers.DEVICE, _run(asked), folder, **env)
            return self[mode]

    return Modes()


@pytest.fixture(scope="module")
def repeated(tmp_path_factory, asked) -> dict[str, dict[str, Finished]]:
    """The results of plans that come again, by the way of running."""

    class Ways(dict[str, dict[str, Finished]]):
        def __missing__(self, way: str) -> dict[str, Finished]:
            folder = _begin(tmp_path_factory, way)
            env = {"ACC_SKIP_PASSES": None, **REPEATED[way]}
            self[way] = _batch(helpers.DEVICE, _run(asked), folder, ROUNDS[way], **env)
            return self[way]

    return Ways()


def _near(mine: torch.Tensor, theirs: torch.Tensor, apart: float = 0.0) -> bool:
    """Whether floats are within the bounds of their type; NaN is where NaN is."""
    relative, absolute = BOUNDS[theirs.dtype]
    absolute = max(absolute, apart)
    return torch.allclose(mine, theirs, rtol=relative, atol=absolute, equal_nan=True)


def _difference(mine: object, theirs: object, close: bool, apart: float = 0.0) -> str:
    if type(mine) is not type(theirs):
        return f"{type(mine).__name__} instead of {type(theirs).__name__}"
    if not isinstance(theirs, Frozen) or not isinstance(mine, Frozen):
        same = mine == theirs or (mine != mine and theirs != theirs)
        if close and isinstance(theirs, float):
            same = same or _near(torch.tensor(mine), torch.tensor(theirs), apart)
        return "" if same else f"{mine!r} instead of {theirs!r}"
    if mine.device != helpers.DEVICE and theirs.device != mine.device:
        return f"the tensor is on {mine.device}"
    for name in ("dtype", "shape", "stride", "offset", "requires_grad"):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name} {getattr(mine, name)} instead of {getattr(theirs, name)}"
    if close and theirs.values.dtype in BOUNDS:
        if theirs.values.layout == torch.strided and _near(mine.values, theirs.values, apart):
            return ""
    if mine.values.layout != torch.strided:
        found = helpers.tensor_differences(mine.values, theirs.values)
        return str(found[0]) if found else ""
    difference = helpers.value_difference(mine.values, theirs.values)
    return difference[1] if difference else ""


def _compare(mine: Finished, theirs: Finished, close: bool = False, apart: float = 0.0) -> None:
    assert not theirs.error, f"the program fails on the CPU:\n{theirs.error}"
    assert not mine.error, mine.error
    lines = []
    for number, result in enumerate([*mine.earlier, mine.result], start=1):
        a, b = helpers.leaves(result), helpers.leaves(theirs.result)
        assert len(a) == len(b), f"{len(a)} results instead of {len(b)} in round {number}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            text = _difference(x, y, close, apart)
            if text:
                lines.append(f"  round {number}, result {i}: {text}")
    assert not lines, "differs from the CPU:\n" + "\n".join(lines)


def _begin(factory: pytest.TempPathFactory, batch: str) -> Path:
    """A folder for a batch, whose beginning a file tells all processes that share the tests.

    Fails where it has begun before: without `_apart` each process would run each batch, and every
    test would still pass, in twice the time.
    """
    folder = factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    (shared / f"batch {batch} began").touch(exist_ok=False)
    return factory.mktemp(batch)


def _apart(names: Iterable[str]) -> list[Any]:
    """What runs all programs in its own way, for one of the processes that share the tests."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.mark.parametrize("mode", _apart(helpers.MODES))
@pytest.mark.parametrize("name", NAMES)
def test_program(on_cpu, on_device, device, name, mode):
    _compare(_found(on_device[mode], name), on_cpu[name])


@pytest.mark.parametrize("way", _apart(REPEATED))
@pytest.mark.parametrize("name", NAMES)
def test_repeated_program(on_cpu, repeated, device, name, way):
    found = _found(repeated[way], name)
    _compare(found, on_cpu[name], close=True, apart=AMPLIFIED.get(name, 0.0))


@pytest.mark.parametrize("way", _apart(FUSED))
def test_programs_were_fused(repeated, acc_only, way):
    launched = [found.name for found in repeated[way].values() if found.launches > 0]
    assert len(launched) >= len(NAMES) // 2, f"only {len(launched)} programs: {launched}"


@pytest.mark.parametrize("way", _apart(["captured", "emulated"]))
def test_programs_were_captured(repeated, acc_only, way):
    captured = [found.name for found in repeated[way].values() if found.captured > 0]
    assert len(captured) >= len(NAMES) // 2, f"only {len(captured)} programs: {captured}"


def test_there_are_enough_programs():
    assert len(NAMES) >= 60
