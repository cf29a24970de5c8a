"""Ranks that pause behind a collective, or ask whether it is over, wait for nobody's program."""

from __future__ import annotations

import pytest

from tests.distributed.test_faults import reduced

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

TWO = """
a, b = torch.ones(4, device=device), torch.ones(5, device=device)
store = dist.distributed_c10d._get_default_store()
dist.all_reduce(a.clone())
dist.all_reduce(b.clone())
torch.acc.synchronize()
def two():
    if RANK == 0:
        first = dist.all_reduce(a, async_op=True)
        second = dist.all_reduce(b, async_op=True)
        PAUSE
    else:
        dist.all_reduce(a)
        a.sum().item()
        report(read=True)
        store.wait(["go"])
        dist.all_reduce(b)
    report(a=a.tolist(), b=b.tolist())
heard(two)
"""


@pytest.mark.parametrize(
    "pause",
    [
        """
        while not first.is_completed():
            time.sleep(0.01)
        report(second=second.is_completed())
        store.set("go", "1")
        while not second.is_completed():
            time.sleep(0.01)
""",
        """
        asleep_until_reported(1)
        store.set("go", "1")
""",
    ],
    ids=["asks", "sleeps"],
)
def test_a_later_collective_keeps_nobody_waiting(pause):
    """Rank 1 comes to it only after rank 0 has seen the end of the first, or that it was read."""
    first, second = reduced(TWO.replace("        PAUSE\n", pause.lstrip("\n")))
    assert not first.get("second", False)
    for rank in (first, second):
        assert rank["text"] == ""
        assert rank["a"] == [2] * 4 and rank["b"] == [2] * 5


def test_work_that_waits_for_others_goes_on_when_it_is_read():
    pause = """
        time.sleep(1)
        kept = [a * i for i in range(3)]
"""
    code = TWO.replace("        PAUSE\n", pause.lstrip("\n")).replace(
        'store.wait(["go"])', "time.sleep(1)"
    )
    for rank in reduced(code):
        assert rank["text"] == ""
        assert rank["a"] == [2] * 4 and rank["b"] == [2] * 5


def test_a_process_that_records_slowly_keeps_nobody_waiting():
    code = """
def slow():
    dist.all_reduce(x)
    if RANK == 0:
        y, until = torch.zeros(3, device=device), time.monotonic() + 100
        while not os.path.exists(os.environ["REPORTS"] + "/1"):
            assert time.monotonic() < until, "rank 1 waits for this one"
            y = y + 1
            time.sleep(0.05)
    else:
        x.sum().item()
        report(read=True)
heard(slow)
"""
    first, second = reduced(code)
    assert first["text"] == second["text"] == "" and second["read"]


def test_memory_that_runs_out_beside_the_program_is_told_by_the_next_operator():
    """The thread that submits what is idle has nobody to tell."""
    code = """
from torchacc_device import _C
source = torch.ones(300, device=device)
torch.acc.synchronize()
if RANK == 0:
    outer = torch.outer(source, source)
    x.add_(outer[0, 0])
    _C.fail_allocations(0, 1 << 40, 100_000)
dist.all_reduce(x)
if RANK == 0:
    for _ in range(60):  # that thread may be late
        time.sleep(1)
        try:
            x + 1
        except torch.OutOfMemoryError as error:
            report(told=str(error))
            break
    _C.fail_allocations(0, 0)
report(x=(x + 1)[0].item())
"""
    first, second = reduced(code, ACC_EXECUTOR="host")
    assert "goes on at this operator" in first["told"]
    assert first["x"] == second["x"] == 5.0


def test_ctrl_c_ends_a_wait_of_the_thread_beside_the_program():
    """Rank 0 has paused, so that thread waits for rank 1, and the program for that thread."""
    code = """
import subprocess, threading
store = dist.distributed_c10d._get_default_store()
if RANK == 1:
    dist.all_reduce(x)
    time.sleep(0.5)  # until it is told; rank 0 has not come, so it is not submitted
    resumed = ["sh", "-c", f"sleep 100; kill -CONT {os.getpid()}"]  # if rank 0 does not do it
    subprocess.Popen(resumed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store.set("stops", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    store.wait(["stops"])
    dist.all_reduce(x)
    time.sleep(1)
    interrupted_where_it_waits()
    try:
        x.sum().item()
        time.sleep(0.1)
    except BaseException as error:
        state = open(f"/proc/{int(store.get('stops'))}/stat").read().rpartition(") ")[2][0]
        report(kind=type(error).__name__, state=state)
    os.kill(int(store.get("stops")), signal.SIGCONT)
"""
    first, _ = reduced(code)
    assert first["kind"] == "KeyboardInterrupt"
    assert first["state"] == "T"  # rank 1 was still stopped


def test_what_fails_as_the_work_stops_is_not_the_collective_it_stops_before():
    """Rank 1 ends after it has told of the first and before it begins it."""
    code = """
a, b = torch.ones(4, device=device), torch.ones(5, device=device)
store = dist.distributed_c10d._get_default_store()
dist.all_reduce(a.clone())
torch.acc.synchronize()
if RANK == 1:
    work = dist.all_reduce(a, async_op=True)
    time.sleep(1)
    store.set("ends", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
store.wait(["ends"])
pid = int(store.get("ends"))
with contextlib.suppress(OSError):
    while open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0] != "Z":
        time.sleep(0.01)
time.sleep(0.5)
dist.all_reduce(a, async_op=True)
dist.all_reduce(b, async_op=True)
time.sleep(3)
heard(lambda: b.sum().item())
"""
    first, _ = reduced(code, check=False)
    assert "what was under way before [acc::all_reduce_] failed" in first["text"]
    assert "collective number 2 of the group, all_reduce of 4 Float" in first["text"]


@pytest.mark.parametrize("given_up", [True, False], ids=["storage", "operator"])
def test_what_comes_while_the_work_is_on_its_way_to_a_stop(given_up):
    """The thread that submits it has begun, and rank 1 comes to the second collective later."""
    code = f"""
store = dist.distributed_c10d._get_default_store()
a, b = torch.ones(4, device=device), torch.ones(5, device=device)
m = torch.full((512, 512), 1 / 512, device=device)
def work(times):
    y = m
    for _ in range(times):
        y = y @ m
    return y
began = time.monotonic()
work(20).sum().item()
second_of_work = int(20 / (time.monotonic() - began)) + 1
def meanwhile():
    if RANK == 1:
        dist.all_reduce(a)
        a.sum().item()
        store.wait(["go"])
        dist.all_reduce(b)
    else:
        y = work(2 * second_of_work)
        kept = y + 1
        dist.all_reduce(a)
        dist.all_reduce(b)
        time.sleep(1)
        store.set("go", "1")
        if {given_up}:
            kept.untyped_storage().resize_(0)
        else:
            kept += 1
        report(y=abs(y.sum().item() - 512) < 1, size=kept.untyped_storage().nbytes())
    report(a=a.tolist(), b=b.tolist())
heard(meanwhile)
"""
    first, second = reduced(code)
    assert first["text"] == second["text"] == ""
    assert first["y"] and first["size"] == (0 if given_up else 512 * 512 * 4)
    for rank in (first, second):
        assert rank["a"] == [2] * 4 and rank["b"] == [2] * 5
