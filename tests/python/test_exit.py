"""The end of the process: what is pending, what fails, and what runs after acc's own end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests import helpers
from tests.helpers import run_python

WORK = """
a = torch.rand(256, 256).to(DEVICE)
b = a
for _ in range(50):
    b = (b @ a).clamp(-1, 1)
w = torch.nn.Parameter(torch.ones(256, 256, device=DEVICE))
(w @ b).sum().backward()
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import sys; sys.exit(0)", 0),
        ("import os; os._exit(5)", 5),
        ("raise ValueError('told')", 1),
        ("import atexit; atexit.register(lambda: print(b.sum().isfinite().item()))", 0),
        ("import builtins; builtins.kept = (a, b, w)", 0),
        ("import gc; gc.disable(); w.me = w; w.kept = b", 0),
    ],
)
def test_exit_with_work_in_flight(device, how, status):
    done = run_python(WORK + how, timeout=300, check=False, fresh=True)
    assert done.returncode == status, done.stderr[-3000:]
    if status == 1:
        assert done.stderr.strip().endswith("ValueError: told")
    else:
        assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr[-2000:]
    if "atexit" in how:
        assert done.stdout.strip() == "True"


def at_exit(function: str, code: str, **env: str) -> str:
    """What is printed by a `function` that runs when acc's own at exit has run."""
    code = f"import atexit\n@atexit.register\ndef last():\n    {function}\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=helpers.ROOT,
        env=helpers.child_env(**env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_operators_at_the_very_end(acc_only):
    code = """
import torch, torchacc_device
total = torch.full((2,), 8.0, device="acc")
class Late:
    def __del__(self):
        print((total / 8).tolist())
late = Late()
"""
    told = at_exit("print((total / 4).tolist(), total.add_(1).tolist())", code)
    assert told.splitlines() == ["[2.0, 2.0] [9.0, 9.0]", "[1.125, 1.125]"]


@pytest.mark.usefixtures("recording")
def test_what_fails_on_one_device_at_the_end_is_done_on_the_next(acc_only):
    code = """
import torch, torchacc_device
table, other = torch.ones(3, device="acc:0"), torch.ones(3, device="acc:1")
other.cpu(), table.cpu()
picked = table.index_select(0, torch.tensor([9], device="acc:0"))
other.mul_(3)
def told():
    try:
        return picked.tolist()
    except RuntimeError as error:
        return "no valid contents" in str(error)
"""
    told = at_exit("print(other.tolist(), told())", code, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host")
    assert told.strip() == "[3.0, 3.0, 3.0] True"


@pytest.mark.usefixtures("recording")
def test_work_that_waits_for_memory_at_the_end(acc_only):
    code = """
import torch
from torchacc_device import _C
source, small = torch.ones(300, device="acc"), torch.ones(3, device="acc")
_C.flush()
total = small + 1
outer = torch.outer(source, source)
_C.fail_allocations(0, 1 << 40, 100_000)
def told():
    try:
        return outer.tolist()
    except RuntimeError as error:
        return "no valid contents" in str(error)
"""
    told = at_exit("print(total.tolist(), told())", code, ACC_EXECUTOR="host")
    assert told.strip() == "[2.0, 2.0, 2.0] True"


def test_exit_while_a_daemon_thread_records(device):
    done = run_python(
        """
import threading, time
def work():
    x = torch.ones(32, 32, device=DEVICE)
    while True:
        x = (x @ x).clamp(-1, 1)
        x.sum().item()
thread = threading.Thread(target=work, daemon=True)
thread.start()
time.sleep(0.5)
print("alive", thread.is_alive(), flush=True)  # an abort flushes nothing
""",
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["alive", "True"]
    # Python ends daemon threads by unwinding them wherever they are; in native code that may abort
    # the process, with the CPU as well. It must not hang or fault.
    assert done.returncode in (0, -signal.SIGABRT), done.stderr[-3000:]


def test_a_thread_that_outlives_the_main_one(device):
    done = run_python(
        """
import threading, time
def work():
    x = torch.ones(32, 32, device=DEVICE)
    for _ in range(300):
        x = (x @ x).clamp(-1, 1)
    time.sleep(0.2)
    print(x.sum().item())
threading.Thread(target=work).start()
""",
        timeout=300,
    )
    assert done.stdout.strip() == "1024.0"


def test_exit_by_a_signal(device):
    code = (
        "import torch\nfrom tests.helpers import DEVICE, load_device\nload_device()\n"
        + WORK
        + "print('ready', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=helpers.ROOT,
        env=helpers.child_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline().strip() == "ready"
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGTERM, errors


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("ended", ["", "raise ValueError('told')"])
def test_a_step_that_fails_at_the_very_end_is_told_once(acc_only, ended):
    code = f"""
import torch, torchacc_device
table, index = torch.ones(3, device="acc"), torch.tensor([9], device="acc")
picked = table.index_select(0, index)
{ended}
"""
    done = run_python(code, check=False, fresh=True)
    assert ("the last step of this process has failed" in done.stderr) == (not ended)
    assert ("ValueError: told" if ended else "index out of range") in done.stderr
