"""Ranks that leave each other where all that they call is known: Gloo does not mix their bytes."""

from __future__ import annotations

import re
import time

import pytest

from tests.distributed.ranks import run_to_end
from tests.distributed.test_faults import BEGIN, reduced

pytestmark = pytest.mark.usefixtures("acc_only")

# Four steps and then the loss of all, but for an epoch in which rank 1 has a step less.
EPOCHS = """
torch.manual_seed(0)
layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train():
    for epoch in range(6):
        for _ in range(3 if epoch == 3 and RANK == 1 else 4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            LOGGED
        value = loss.detach().clone()
        dist.all_reduce(value)
        value.item()
"""
BOTH = (
    r"collective number \d+ of the group is all_reduce of 66112 Float \(0\) at \S+:\d+ in train, "
    r"\S+ on rank 0, and all_reduce of 1 Float \(0\) at \S+:\d+ in train on rank 1"
)


@pytest.mark.parametrize(("ranks", "logged"), [(2, "pass"), (2, "loss.item()"), (4, "pass")])
def test_a_rank_that_has_a_step_less_than_the_others_is_named(ranks, logged):
    for rank in reduced(EPOCHS.replace("LOGGED", logged) + "heard(train)", ranks):
        assert rank["kind"] == "DistBackendError"
        assert re.search(BOTH, rank["text"]), rank["text"]
        assert rank["seconds"] < 18


def test_programs_that_do_not_catch_it_end():
    began = time.monotonic()
    code = BEGIN + EPOCHS.replace("LOGGED", "pass") + "train()"
    for rank in run_to_end(code, 2, check=False):
        assert rank.status == 1, rank.stderr
        assert re.search(BOTH, rank.stderr), rank.stderr
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("call", "ranks", "larger"),
    [
        ("all_reduce(each)", 2, 0),
        ("all_reduce(each)", 4, 1),
        ("broadcast(each, 0)", 2, 1),
        ("broadcast(each, 0)", 4, 0),
    ],
)
def test_calls_in_an_order_that_both_know_are_told_whoever_has_more(call, ranks, larger):
    """Where less comes than there is room for, Gloo alone would go on with wrong numbers."""
    code = """
a, b = (torch.full((size,), RANK + 1.0, device=device) for size in (100, 200))
def both_orders():
    for each in (a, a, b, b, a, b, a):
        dist.CALL
        torch.acc.synchronize()
    one = RANK == 1
    each = torch.full_like(b if one == (LARGER == 1) else a, RANK + 1.0)
    try:
        dist.CALL
        report(went_on=each.unique().tolist())
    finally:
        dist.all_reduce(a)
        a.sum().item()
heard(both_orders)
""".replace("CALL", call).replace("LARGER", str(larger))
    name = call.partition("(")[0]
    sizes = [100, 200] if larger == 1 else [200, 100]
    first, second = (rf"{name} of {size} Float \(0\) at \S+:\d+ in both_orders" for size in sizes)
    done = reduced(code, ranks)
    for rank in done:
        assert rank["kind"] == "DistBackendError"
        both = f"collective number 8 of the group is {first} on rank 0, and {second} on rank 1"
        assert re.search(both, rank["text"]), rank["text"]
        assert rank["seconds"] < 18
        # Who needs nothing of rank 1 may have had what rank 0 sent.
        assert rank.get("went_on", [1]) == [1]
    assert "went_on" not in done[1]


def test_more_may_be_recorded_than_a_ledger_keeps():
    code = """
y = torch.ones(1, device=device)
for _ in range(1500):
    dist.all_reduce(y, dist.ReduceOp.MAX, async_op=True)
y += RANK
dist.all_reduce(y)
report(y=y.item())
"""
    for rank in reduced(code):
        assert rank["y"] == 3


def test_a_group_that_was_left_so_can_be_destroyed_and_made_again():
    """Gloo's threads still wait for the other rank then, and the group's end does not."""
    code = (
        BEGIN
        + """
a = torch.ones(4, device=device)
for _ in range(5):
    dist.all_reduce(a)
    dist.broadcast(a, 0)
try:
    dist.all_reduce(a) if RANK == 0 else dist.broadcast(a, 0)
    a.sum().item()
except dist.DistBackendError:
    report(told=True)
dist.destroy_process_group()
dist.init_process_group("acc")
b = torch.ones(4, device=device)
dist.all_reduce(b)
report(again=b.tolist())
dist.destroy_process_group()
"""
    )
    began = time.monotonic()
    for rank in run_to_end(code, 2):
        assert rank.reports == {"told": True, "again": [2.0] * 4}
    assert time.monotonic() - began < 60
