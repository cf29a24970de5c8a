"""Tests as benchmarks/gpu_check.py runs them on a GPU: what wrong data end there, and what bounds
mean.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_check, gpu_tests
from scripts import run_tests
from tests import helpers
from tests.helpers import run_python
from tests.python.test_gpu_check import check_for, fake_tests

pytestmark = pytest.mark.usefixtures("acc_only")

ON_CUDA = """
from tests import helpers
from tests.conftest import *

helpers.on_cuda = lambda: True
"""


def test_behind_a_test_that_loses_the_device_another_process_goes_on(tmp_path, monkeypatch):
    """CUDA would refuse all tests behind it; those of the file before it ran already."""
    if helpers.on_cuda():
        pytest.skip("waits that fail are those of the host")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", helpers.child_env()["PYTHONPATH"])
    use = "from tests import helpers\n"
    lose = "helpers.extension().fail_waits(710)\n    helpers.synchronize()"
    files = fake_tests(
        tmp_path,
        test_bad="raise ValueError",
        test_one=f"{use}def test_it(): helpers.synchronize()",
        test_loses=f"""
{use}
import pytest
@pytest.mark.parametrize("each", ["a b", "a c"])
def test_loses(each):
    {lose}
def test_behind(): helpers.synchronize()
""",
        test_last=f"{use}def test_loses():\n    {lose}",
    )
    (tmp_path / "tests/conftest.py").write_text(ON_CUDA)
    check = check_for(tmp_path / "out")
    gpu_check.pytest_of(check, "tests", "all", files, 300.0)
    said = [row.said.partition(" in ")[0] for row in check.rows]
    log = (check.out / "log.txt").read_text()
    first, *others = said
    assert first == "1 failed, 1 passed, 1 error", log[-3000:]  # which is no lost device
    assert others == ["1 failed", "1 failed, 1 passed"], log[-3000:]
    assert all("AcceleratorError" in row.said for row in check.rows)


def test_where_each_test_loses_the_device_two_processes_are_tried(tmp_path, monkeypatch):
    """Even where a process with a lost device has much to say at its end."""
    if helpers.on_cuda():
        pytest.skip("waits that fail are those of the host")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", helpers.child_env()["PYTHONPATH"])
    text = """
import atexit
import pytest
from tests import helpers
atexit.register(print, "warning\\n" * 20)
@pytest.mark.parametrize("each", range(9))
def test_loses(each):
    helpers.extension().fail_waits(710)
    helpers.synchronize()
"""
    files = fake_tests(tmp_path, test_one=text, test_two="def test_it(): pass")
    (tmp_path / "tests/conftest.py").write_text(ON_CUDA)
    check = check_for(tmp_path / "out")
    gpu_check.pytest_of(check, "tests", "all", files, 300.0)
    assert [row.status for row in check.rows] == ["BAD", "BAD", "not run"]
    assert check.rows[-1].said == "no test passes; test_one, test_two were not tried"


def test_the_stage_of_an_emulated_gpu_runs_its_kernels_in_captured_work(monkeypatch):
    """Not the host's, which would pass all of its tests as well."""
    if helpers.on_cuda():
        pytest.skip("there is nothing to emulate")
    code = """
from tests import helpers
x = torch.linspace(0, 1, 64, device=DEVICE)
for _ in range(6):
    made = torch.relu(x * 2 - 1) + 3
    torch.acc.synchronize()
counts = helpers.stats()
assert counts["kernels/prepared for a device"] >= 1, counts
assert counts["captures_submitted"] >= 1, counts
"""
    ran = SimpleNamespace(run=lambda *_, env, **__: run_python(code, **env))
    monkeypatch.setattr(run_tests, "subprocess", ran)
    assert run_tests.STAGES["emulated"]({}, None) == 0


MARKED = ["-m", gpu_tests.MARKED]


@pytest.mark.parametrize(
    ("paths", "chosen", "count"),
    [
        (["tests/programs"], ["-k", gpu_tests.FEW_PROGRAMS], len(gpu_tests.PROGRAMS)),
        (gpu_tests.MODELS, ["-k", gpu_tests.FEW_MODELS], 6),
        (gpu_check.marked(), MARKED, gpu_tests.MARKED_TESTS),
        (gpu_check.marked(), [*MARKED, "-k", gpu_tests.FEW_MARKED], gpu_tests.FEW_MARKED_TESTS),
    ],
    ids=["programs", "models", "marked", "few marked"],
)
def test_so_many_are_chosen(paths, chosen, count):
    """Who changes how many tests need a GPU looks at the time there is for them, too."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=helpers.ROOT,
        env=helpers.child_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert sum("::" in line for line in done.stdout.splitlines()) == count, done.stdout[-3000:]


def test_what_only_a_gpu_can_tell_comes_first():
    files = [Path(file).stem for file in gpu_check.marked()]
    assert files[0] == gpu_tests.MARKED_FIRST and files[1:] == sorted(files[1:])


WRONG_DATA = (
    "test_captured_plans.py::test_an_error_in_a_captured_step_is_that_of_its_operator",
    "test_captured_plans.py::test_results_of_a_capture_that_failed",
    "test_reductions.py::test_a_target_that_is_no_class_is_an_error",
    "test_stream.py::test_an_error_of_recorded_work_surfaces_at_synchronize",
)


def test_wrong_data_end_no_context_of_a_gpu(tmp_path):
    """Each of these would leave the tests behind it without a device."""
    (tmp_path / "as_on_cuda.py").write_text(ON_CUDA.replace("from tests.conftest import *", ""))
    found = helpers.child_env()["PYTHONPATH"]
    options = ["-p", "as_on_cuda", "-p", "no:cacheprovider", "-o", "addopts=-rs"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/python/{t}" for t in WRONG_DATA)],
        cwd=helpers.ROOT,
        env=helpers.child_env(PYTHONPATH=os.pathsep.join([found, str(tmp_path)]), ACC_MODE="full"),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    assert re.fullmatch(r"=+ \d+ skipped in .*", said[-1]), done.stdout[-3000:]
    where = [line for line in said if "wrong data end the CUDA context" in line]
    assert len(where) == len(WRONG_DATA), done.stdout[-3000:]


@pytest.mark.parametrize(
    ("module", "tf32"),
    [
        ("tests.helpers", False),
        ("tests.opinfo.worker", False),
        ("tests.programs.batch", False),
        ("benchmarks.worker", True),
        ("benchmarks.gpu_probe", True),
    ],
)
def test_tests_compare_convolutions_of_float32(module, tf32):
    """Their bounds are narrower than TF32, which what is measured keeps where PyTorch has it."""
    code = f"import torch, {module}; print(torch.backends.cudnn.allow_tf32)"
    done = helpers.template().run(code, helpers.child_env(), timeout=300)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [str(tf32)]), done.stderr
