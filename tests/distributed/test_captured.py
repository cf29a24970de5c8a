"""Collectives in captured work, and between its pieces.

On a GPU a transfer is work on another stream that a capture has to fork and to join itself. So each
piece ends what it begins, and what was begun outside of pieces is waited for outside of them; the
host's captures keep to the same rule.
"""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests import helpers
from tests.distributed.ranks import run_ranks
from torchacc_device import _distributed

SETUP = """
import torch.distributed as dist
from tests import helpers
extension = helpers.extension()
torch.use_deterministic_algorithms(True)
dist.init_process_group("acc")
COUNTED = ("captures_submitted", "captured_launches", "transfers")

def repeated(step, count=12, warm=6):
    '''What the later steps count; each has to give what it says.'''
    for i in range(warm + count):
        if i == warm:
            before = helpers.stats()
        mine, wanted = step(i)
        assert torch.allclose(mine.cpu(), wanted), (i, mine.cpu(), wanted)
    after = helpers.stats()
    report(**{name: after[name] - before[name] for name in COUNTED})
    report(cut_short=after.get("transfers_cut_short/end of a piece", 0))
"""

# The sum is under way while the running sum is computed.
CUT = """
def step(i):
    x = torch.full((64,), float(i + RANK))
    on_device = x.to(DEVICE)
    work = on_device * 2
    dist.all_reduce(work)
    running = on_device.cumsum(0)
    made = work + running
    total = sum(float(i + rank) * 2 for rank in range(WORLD))
    helpers.flush()
    return made, x.cumsum(0) + total
"""


@pytest.fixture(autouse=True)
def host_only(device, capturing):
    if helpers.extension().executor_name() != "host":
        pytest.skip("benchmarks/gpu_check.py has the same for one GPU")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_a_collective_is_one_launch(ranks):
    for each in run_ranks(SETUP + CUT + "repeated(step)", ranks, ACC_HOST_GRAPHS="1"):
        assert each.reports["captures_submitted"] == 12
        assert each.reports["captured_launches"] == 12
        assert (each.reports["transfers"], each.reports["cut_short"]) == (12, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("refused", "pieces", "cut"),
    [
        ("aten::cumsum", 2, True),  # what runs meanwhile
        ("acc::all_reduce_", 3, False),  # what begins; what waits stands outside with it
        ("acc::await_", 2, True),  # what waits
    ],
)
def test_no_transfer_crosses_the_end_of_a_piece(ranks, refused, pieces, cut):
    """Whatever cannot be captured stands outside, and there are the right numbers."""
    code = SETUP + CUT + f"extension.refuse_captures({refused!r})\nrepeated(step)"
    for each in run_ranks(code, ranks, ACC_HOST_GRAPHS="1", ACC_SKIP_PASSES="fuse,rows"):
        assert each.reports["captures_submitted"] == 12
        assert each.reports["captured_launches"] == 12 * pieces
        assert each.reports["transfers"] == 12
        assert (each.reports["cut_short"] > 0) == cut


# Once all is captured, the second rank comes only after the first has computed what stands behind
# the collective, which a thread sees in its memory.
MEANWHILE = """
import ctypes, datetime, threading, time
store = dist.distributed_c10d._get_default_store()
seen = torch.zeros(64, device=DEVICE)
memory = (ctypes.c_float * 64).from_address(seen.data_ptr())

def watch(i, wanted):
    while memory[63] != wanted:
        time.sleep(0.001)
    store.set(f"step {i}", "computed")

def step(i):
    x = torch.full((64,), float(i + RANK + 1))
    on_device = x.to(DEVICE)
    work = on_device * 2
    if i >= 6 and RANK == 0:
        threading.Thread(target=watch, args=(i, float(64 * (i + 1))), daemon=True).start()
    elif i >= 6:
        store.wait([f"step {i}"], datetime.timedelta(seconds=30))
    dist.all_reduce(work)
    torch.cumsum(on_device, 0, out=seen)
    made = work + seen
    total = sum(float(i + rank + 1) * 2 for rank in range(WORLD))
    helpers.flush()
    return made, x.cumsum(0) + total
"""


def test_pieces_run_while_what_began_between_them_is_under_way():
    """As on GPUs, where collectives of several processes are between the pieces."""
    code = SETUP + MEANWHILE + "extension.refuse_captures('acc::all_reduce_')\nrepeated(step)"
    for each in run_ranks(code, 2, ACC_HOST_GRAPHS="1", ACC_SKIP_PASSES="fuse,rows"):
        assert each.reports["captures_submitted"] == 12
        assert each.reports["captured_launches"] == 12 * 3
        assert each.reports["cut_short"] == 0


LATE = """
import datetime, time
import torch.distributed as dist
from tests import helpers
dist.init_process_group("cpu:gloo,acc:acc", timeout=datetime.timedelta(seconds=60))
def step(i):
    x = torch.full((4096,), float(i), device=DEVICE)
    y = x * 2
    dist.all_reduce(y)
    made = y + x.cumsum(0)
    return made[0].item()
for i in range(8):
    assert step(i) == i * (2 * WORLD + 1), i
before = helpers.stats()
# Only now: what is not late on purpose may be.
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)
if RANK == 1:
    # asleep for longer than the other waits, then it sends what nobody wants any more
    time.sleep(6)
try:
    step(8)
    report(text="")
except RuntimeError as error:
    report(text=str(error))
after = helpers.stats()
report(captured=after["captures_submitted"] - before["captures_submitted"])
# memory that the transfer may still write to is nobody else's
kept = [torch.full((4096,), float(i), device=DEVICE) for i in range(64)]
time.sleep(6 if RANK == 0 else 0.5)
report(same=all(bool((tensor == i).all()) for i, tensor in enumerate(kept)))
x = torch.arange(5.0, device=DEVICE)
report(more=(x.cumsum(0) * 2).tolist())
os._exit(0)
"""


def test_a_transfer_that_is_given_up_leaves_the_memory_of_captured_work():
    first, second = run_ranks(LATE, 2, ACC_HOST_GRAPHS="1")
    assert "all_reduce" in first.reports["text"] and "Timed out" in first.reports["text"]
    assert second.reports["text"]
    for each in (first, second):
        assert each.reports["captured"] >= 1
        assert each.reports["same"]
        assert each.reports["more"] == [0, 2, 6, 12, 20]


INTERRUPTED = """
import os, signal, threading, time
from torchacc_device import _C
dist.init_process_group("acc")
store = dist.distributed_c10d._get_default_store()
# Its ranks do not tell each other what they do: one of them goes on by the transport alone.
transport = dist.ProcessGroupGloo(dist.PrefixStore("untold", store), RANK, WORLD)
group = _C.ProcessGroupACC(transport, None)
x = torch.ones(1 << 20, device=DEVICE)
def step():
    group.allreduce([x], dist.AllreduceOptions())
    x.mul_(0.5)
    return x[0].item()
for _ in range(8):
    step()
if RANK == 0:
    begun = helpers.stats()["captures_submitted"]
    try:
        try:
            threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            step()
        except RuntimeError:
            for _ in range(200):  # Python's own exception comes here at the latest
                time.sleep(0.1)
    except KeyboardInterrupt:
        report(captured=helpers.stats()["captures_submitted"] - begun)
    del x
    torch.acc.empty_cache()
    kept = [torch.full((1 << 20,), 7.0, device=DEVICE) for _ in range(8)]
    torch.acc.synchronize()
    store.set("given up", "1")
    store.wait(["come"])
    report(same=all(bool((tensor == 7).all()) for tensor in kept))
else:
    store.wait(["given up"])
    transport.allreduce([torch.full((1 << 20,), 5.0)], dist.AllreduceOptions()).wait()
    store.set("come", "1")
os._exit(0)
"""


@pytest.mark.parametrize("captured", [False, True])
def test_a_collective_that_goes_on_without_this_process_writes_to_nobodys_memory(captured):
    graphs = {"ACC_HOST_GRAPHS": "1"} if captured else {}
    code = "from tests import helpers\n" + INTERRUPTED
    first, _ = run_ranks(code, 2, **graphs)
    assert first.reports["captured"] == int(captured)
    assert first.reports["same"]


def test_ranks_need_not_capture_together(monkeypatch):
    """By default NCCL waits for that; who wants it so is told what it means."""
    made = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *arguments):
            made.append(os.environ["NCCL_GRAPH_REGISTER"])

    class Given:
        timeout = None

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")  # so that it is taken back
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    _distributed._nccl((None, 0, 2), Given(), None)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    with pytest.warns(UserWarning, match=r"NCCL_GRAPH_REGISTER=1: .*Unset it"):
        _distributed._nccl((None, 0, 2), Given(), None)
    assert made == ["0", "1"]
