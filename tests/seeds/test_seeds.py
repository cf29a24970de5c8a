"""The documents' scripts, and our own with the same calls, run to the end with eager's numbers."""

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
DOCUMENTS = ("001", "002")  # 003 is 002 once more, without its indentation
FULL_ONLY = pytest.mark.skipif(
    not helpers.FULL, reason="differs from 001 by one line break; ACC_TEST_FULL=1 runs it"
)
BATCH, EVERY = 64, 20
OWN_BATCH = 32
LINE = re.compile(r"^Epoch: (\d+), Step: (\d+), Loss: (\d+\.\d{4}), Throughputs: (\d+\.\d{4})")


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


def run_script(script: Path, *arguments: str, eager: bool = False) -> Run:
    # A network of fifty layers trains apart from eager's last bits within a few steps.
    changes: dict[str, str | None] = {
        "ACC_TEST_REGISTER": None if eager else "1",
        "ACC_SKIP_PASSES": helpers.BIT_BY_BIT,
    }
    if eager:
        changes |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(HERE / "driver.py"), str(script), *arguments],
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


# --- the documents ------------------------------------------------------------------------------


@functools.cache
def text_of(number: str) -> str:
    text = extract.document(number)
    if text is None:
        pytest.skip(
            f"no document {number} in {extract.folder()}; set ACC_SEEDS_DIR to their folder"
        )
    return text


def small(source: str) -> str:
    # One line printed in each of two epochs; ResNet-50 takes images of 32 x 32 as they are.
    return extract.shrink(source, rows=BATCH * EVERY, side=32, epochs=2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """The native script of the first document by eager CPU, in a process without the device."""
    script = tmp_path_factory.mktemp("reference") / "resnet_native.py"
    script.write_text(small(extract.native_script(text_of("001"))))
    return run_script(script, eager=True)


def test_the_scripts_of_the_documents_are_what_we_know():
    for number in DOCUMENTS:
        native = small(extract.native_script(text_of(number)))
        accelerated = small(extract.accelerated_script(text_of(number)))
        # Three lines more (two of them instead of the device lines), one line less in the loop.
        assert "torchacc" not in native
        assert accelerated.count("torchacc") == 2
        assert len(native.split()) > 100
        compile(native, "native", "exec")
        compile(accelerated, "accelerated", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["001", pytest.param("002", marks=FULL_ONLY)])
def test_the_accelerated_script_of_a_document(device, tmp_path, reference, number):
    script = tmp_path / "resnet_acc.py"
    script.write_text(small(extract.accelerated_script(text_of(number))))
    run = run_script(script)
    assert_ran_on(run, device)
    assert run.report["loader"] == "AsyncLoader"
    assert steps(run) == [(0, 20), (1, 20)]
    assert_same_numbers(run, reference)


@pytest.mark.slow
def test_the_native_script_with_our_device(device, tmp_path, reference):
    script = tmp_path / "resnet_native.py"
    script.write_text(extract.on_device(small(extract.native_script(text_of("001"))), device))
    run = run_script(script)
    assert_ran_on(run, device)
    assert run.report["loader"] == "DataLoader"
    assert_same_numbers(run, reference)


# --- our own ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_reference() -> Run:
    return run_script(HERE / "own_native.py", "cpu", eager=True)


@pytest.fixture(scope="module")
def own_accelerated(own_reference) -> Run:
    return run_script(HERE / "own_accelerate.py")


def test_our_accelerated_script(device, own_accelerated, own_reference):
    assert_ran_on(own_accelerated, device)
    assert own_accelerated.report["loader"] == "AsyncLoader"
    assert steps(own_accelerated) == [(e, s) for e in range(2) for s in (20, 40, 60)]
    assert_same_numbers(own_accelerated, own_reference)


def test_our_native_script(device, own_reference):
    run = run_script(HERE / "own_native.py", device)
    assert_ran_on(run, device)
    assert_same_numbers(run, own_reference)


def test_the_printed_throughput_is_the_true_one(device, own_accelerated):
    """With several steps in flight the line would show how fast steps are recorded, not run."""
    for epoch in range(2):
        lines = [line for line in own_accelerated.lines if line.epoch == epoch]
        # The first window holds the start of the workers.
        samples = OWN_BATCH * EVERY * (len(lines) - 1)
        true = samples / (lines[-1].time - lines[0].time)
        printed = (len(lines) - 1) / sum(1 / line.rate for line in lines[1:])
        assert abs(printed / true - 1) <= 0.05, (epoch, printed, true)


# --- the extraction -----------------------------------------------------------------------------


def test_the_new_side_of_a_diff():
    diff = "  import time\n+ import torchacc\n- import gone\n\n      for x in y:\n-         a\n+ \n"
    assert extract.new_side(diff) == "import time\nimport torchacc\n\n    for x in y:\n\n"
    with pytest.raises(extract.SeedError, match="line 1"):
        extract.new_side("no margin")


def test_shrinking_replaces_sizes_and_nothing_else():
    source = (
        "x = randn(6400, 3, 224, 224)\ny = randint(0, 100, (6400,))\nfor epoch in range(4):\n  z\n"
    )
    assert extract.shrink(source, rows=8, side=16, epochs=1) == (
        "x = randn(8, 3, 16, 16)\ny = randint(0, 100, (8,))\nfor epoch in range(1):\n  z\n"
    )
    with pytest.raises(extract.SeedError, match="6400"):
        extract.shrink(source.replace("(6400,)", "(64,)"), rows=8, side=16, epochs=1)


def test_the_device_line_is_the_only_one_that_changes():
    source = 'a = 1\ndevice = torch.device("cuda:0" if b else "cpu")\nc = device\n'
    assert extract.on_device(source, "acc") == 'a = 1\ndevice = torch.device("acc")\nc = device\n'
    with pytest.raises(extract.SeedError, match="0 lines"):
        extract.on_device("a = 1\n", "acc")


def test_documents_that_are_absent_are_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("ACC_SEEDS_DIR", str(tmp_path))
    assert extract.folder() == tmp_path
    assert extract.document("001") is None
