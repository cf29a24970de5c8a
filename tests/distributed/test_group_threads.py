"""Process groups and threads: several of a program, and a process that may have no more of them."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = """
import contextlib, ctypes, datetime, sys, threading, time
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=20))
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
group = dist.group.WORLD
backend = group._get_backend(device)
other = 1 - RANK
"""
END = """
dist.destroy_process_group()
"""

EXHAUSTED = """
libc = ctypes.CDLL(None)
@contextlib.contextmanager
def no_threads():
    # The stack of each would be larger than what a process can address.
    usual, huge = (ctypes.create_string_buffer(256) for _ in range(2))
    for attributes in (usual, huge):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 50)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(usual) == 0

x, y = torch.arange(4.0, device=device) + 10 * RANK, torch.zeros(4, device=device)
def exchanged():
    out = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(out, x)
    received = dist.irecv(y, other)  # both ask before they send
    dist.send(x, other)
    received.wait()
    return [out.tolist(), y.tolist()]
report(usual=exchanged())
with no_threads():
    report(thread=refused(threading.Thread(target=print).start), found=exchanged())
    received = dist.irecv(y, other)
    dist.send(x + 1, other)
    report(early=received.is_completed())
while not received.is_completed():
    time.sleep(0.01)
report(late=y.tolist())
"""


def test_exchanges_go_on_where_no_thread_can_be_started():
    if helpers.extension().executor_name() != "host":
        pytest.skip("NCCL's need none")
    for number, rank in enumerate(run_ranks(BEGIN + EXHAUSTED + END, 2)):
        found = rank.reports
        there = [10 * (1 - number) + value for value in (0, 1, 2, 3)]
        assert found["usual"] == found["found"] == [[10 + 4 * number, 12 + 4 * number], there]
        assert "can't start new thread" in found["thread"]
        assert not found["early"] and found["late"] == [value + 1 for value in there]


BARRIER = """
sys.setswitchinterval(100)  # who has the interpreter keeps it until it gives it up
sleep = ctypes.PyDLL(None).usleep  # and does not for this
x = torch.ones(4, device=device)
def reduce():
    group.allreduce([x])
def both():
    for _ in range(3):
        if RANK == 1:
            reduce()
        else:
            thread = threading.Thread(target=reduce)
            thread.start()  # returns when that gives the interpreter up, to record,
            sleep(300_000)  # and then waits for it, to note the line
        backend.barrier().wait()
        if RANK == 0:
            thread.join()
report(said=refused(both), x=refused(lambda: report(sum=x.tolist())))
"""


def test_a_barrier_comes_behind_what_another_thread_is_about_to_record():
    for rank in run_ranks(BEGIN + BARRIER + END, 2, check=False):
        assert rank.reports["said"] == rank.reports["x"] == "accepted"
        assert rank.reports["sum"] == [8.0] * 4
