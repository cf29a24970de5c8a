"""Steps of several processes that torchacc.capture replays."""

from __future__ import annotations

import pytest

from tests.distributed.test_faults import reduced

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

STEPS = """
import torchacc
store = dist.distributed_c10d._get_default_store()
def fn(x):
    y = x * 2
    dist.all_reduce(y)
    between()
    return y + 1
step = torchacc.capture(fn)
def steps():
    for i in range(6):
        made = step(torch.full((4,), float(i + RANK), device=device)).tolist()
        assert made == [2.0 * (2 * i + 1) + 1] * 4, (i, made)
        behind(i)
    report(replays=getattr(step, "replays", None))
"""


def test_pauses_within_a_recorded_call():
    """They are longer than those after which a process submits what others wait for."""
    code = "between = lambda: time.sleep(0.4)\nbehind = lambda i: None" + STEPS + "heard(steps)"
    for rank in reduced(code):
        assert rank["text"] == ""
        assert rank["replays"] == 3


def test_a_recorded_call_that_waits_for_who_waits_for_it_is_cut():
    """Rank 1 reads the sum before it says what rank 0 waits for within its call."""
    code = """
calls = [0]
def between():
    calls[0] += 1
    if RANK == 0:
        store.wait([f"read {calls[0]}"])
behind = lambda i: store.set(f"read {i + 1}", "1") if RANK == 1 else None
"""
    once = STEPS.replace("capture(fn)", "capture(fn, warmup=2) if RANK == 0 else fn")
    first, second = reduced(code + once.replace("range(6)", "range(2)") + "heard(steps)")
    assert "recorded nothing for seconds behind a collective" in first["text"]
    assert "Wait outside of the function" in first["text"]
    assert "timed out" not in second["text"].lower()


def test_messages_between_processes_are_no_part_of_a_step():
    code = """
import torchacc
def fn(x):
    y = x * 2
    dist.send(y, 1) if RANK == 0 else dist.recv(y, 0)
    return y + 1
step = torchacc.capture(fn, warmup=2)
def steps():
    for _ in range(2):
        step(torch.ones(4, device=device))
heard(steps)
store = dist.distributed_c10d._get_default_store()
store.set(f"ended {RANK}", "1")
store.wait(["ended 0", "ended 1"])
"""
    for rank in reduced(code):
        assert "exchanges something with other processes at once" in rank["text"]


DDP = """
import torchacc
from torch import nn
def trained(captured):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    def fn(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss
    step = torchacc.capture(fn) if captured else fn
    draws = torch.Generator().manual_seed(RANK)
    losses = []
    for _ in range(10):
        x = torch.randn(6, 8, generator=draws).to(device)
        y = torch.randint(3, (6,), generator=draws).to(device)
        losses.append(step(x, y).item())
    made = [losses, *(each.tolist() for each in net.parameters())]
    return made, (step.recorded, step.replays) if captured else None
plain, _ = trained(False)
made, counts = trained(True)
report(counts=counts, same=made == plain, parameters=made[1:])
"""


@pytest.mark.parametrize(
    ("wrapped", "recorded"),
    [
        ("DistributedDataParallel(net.to(device))", 4),
        ("DistributedDataParallel(net.to(device), gradient_as_bucket_view=True)", 4),
        ("DistributedDataParallel(net.to(device), static_graph=True)", 5),
        ("torchacc.accelerate(net)", 4),
    ],
)
def test_ddp_that_arranges_its_buckets_anew(wrapped, recorded):
    """Where it does so it reads on the host: the calls that are compared come behind that."""
    code = f"wrapped = lambda net: {wrapped}" + DDP
    first, second = reduced(code)
    for rank in (first, second):
        assert rank["counts"] == [recorded, 10 - recorded]
        assert rank["same"]
    assert first["parameters"] == second["parameters"]


@pytest.mark.parametrize(
    "sharded", ["FullyShardedDataParallel(net, device_id=device)", "fully_shard(net)"]
)
def test_fsdp_is_refused_at_once(sharded):
    code = """
import torchacc
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
net = nn.Linear(8, 3).to(device)
model = SHARDED
def fn(x):
    model.zero_grad()
    loss = model(x).sum()
    loss.backward()
    return loss
step = torchacc.capture(fn)
heard(lambda: [step(torch.ones(4, 8, device=device)) for _ in range(9)])
report(recorded=step.recorded)
"""
    for rank in reduced(code.replace("SHARDED", sharded)):
        assert "resizes a tensor that has contents" in rank["text"]
        assert rank["recorded"] == 2
