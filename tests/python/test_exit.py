"""The end of the process: what is pending, and who records."""

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
    done = run_python(WORK + how, timeout=120, check=False, fresh=True)
    assert done.returncode == status, done.stderr[-3000:]
    if status == 1:
        assert done.stderr.strip().endswith("ValueError: told")
    else:
        assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr[-2000:]
    if "atexit" in how:
        assert done.stdout.strip() == "True"


def test_exit_while_a_daemon_thread_records(device):
    done = run_python(
        """
import threading, time
def work():
    x = torch.ones(32, 32, device=DEVICE)
    while True:
        x = (x @ x).clamp(-1, 1)
        x.sum().item()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
print("end")
""",
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "end"
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
        timeout=120,
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
    _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM, errors
