"""Steps that fail before their collectives began: all ranks go on alike, or all of them hear."""

from __future__ import annotations

import re

import pytest

from tests.distributed.test_faults import reduced

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

# The step fails before `a` begins, on the ranks that FAILS says.
FAILING = """
a = torch.full((4,), RANK + 1., device=device)
b = a * 100
table = torch.ones(10, device=device)
wrong = torch.tensor([50], device=device)
dist.all_reduce(a.clone())
torch.acc.synchronize()
def failing():
    c = a.clone()
    if FAILS:
        try:
            bad = table.index_select(0, wrong)
            dist.all_reduce(c)
            torch.acc.synchronize()
        except IndexError:
            report(raised=True)
    else:
        dist.all_reduce(c)
        return c
"""


def test_a_collective_that_was_skipped_is_not_taken_for_the_next_one():
    code = """
def values():
    kept = failing()
    dist.all_reduce(b)
    report(b=b.tolist())
heard(values)
"""
    first, second = reduced("FAILS = RANK == 0" + FAILING + code)
    assert first["raised"]
    for rank in (first, second):
        assert "b" not in rank
        assert rank["kind"] == "DistBackendError"
        assert rank["seconds"] < 18  # less than the timeout
        assert re.search(
            r"rank 0 failed: .*index_select.* \(so it did not begin collective number 2 of the "
            r"group, all_reduce of 4 Float",
            rank["text"],
            re.DOTALL,
        )


@pytest.mark.parametrize("captured", [False, True])
def test_ranks_that_fail_alike_go_on(captured):
    """As they do in eager mode, where none of them has called what came behind the error."""
    code = """
import torchacc
if CAPTURED:
    @torchacc.capture
    def step(table, index):
        y = table[:4] * table.index_select(0, index).sum()
        dist.all_reduce(y)
        return y
    for i in range(5):
        step(table, torch.tensor([i], device=device))
def values():
    for _ in range(2):
        failing()
    if CAPTURED:
        try:
            step(table, wrong)
            torch.acc.synchronize()
        except IndexError:
            report(step=True)
    dist.all_reduce(b)
    dist.barrier()
    report(b=b.tolist())
    if RANK == 0:
        dist.all_reduce(b[:2].clone())
    else:
        dist.all_reduce(b[:3].clone())
heard(values)
"""
    for rank in reduced(f"FAILS = True; CAPTURED = {captured}" + FAILING + code):
        assert rank["raised"] and rank.get("step", False) == captured
        assert rank["b"] == [300] * 4
        assert "ranks do different things" in rank["text"]  # which is found as before


def test_a_rank_that_replays_its_step_fails_like_one_that_records_it():
    code = """
import torchacc
def fn(table, index):
    y = table[:4] * table.index_select(0, index).sum()
    dist.all_reduce(y)
    return y
step = torchacc.capture(fn) if RANK == 0 else fn
def values():
    for i in range(5):
        step(table, torch.tensor([i], device=device)).tolist()
    for i in range(3):
        try:
            step(table, wrong)
            torch.acc.synchronize()
        except IndexError:
            report(raised=i)
        time.sleep(2)  # until the ranks have compared
    report(replays=getattr(step, "replays", None))
    dist.broadcast(b, 0)
    report(b=b.tolist())
    dist.all_reduce(b[: 2 + RANK].clone())
heard(values)
"""
    first, second = reduced("FAILS = False" + FAILING + code)
    assert first["replays"] > 0
    for rank in (first, second):
        assert rank["raised"] == 2 and rank["b"] == [100] * 4
        # ... which is found as before, at its own number
        assert "collective number 11 of the group is all_reduce of 2 Float" in rank["text"]


def test_a_failure_behind_the_last_collective_harms_nobody():
    code = """
store = dist.distributed_c10d._get_default_store()
def values():
    dist.all_reduce(a)
    if RANK == 0:
        try:
            table.index_select(0, wrong).sum().item()
        except IndexError:
            report(raised=True)
    torch.acc.synchronize()
    if RANK == 1:
        time.sleep(2.5)  # the others hear of what failed within a second
    dist.all_reduce(b)
    report(b=b.tolist())
heard(values)
"""
    first, second = reduced("FAILS = False" + FAILING + code)
    assert first["raised"]
    for rank in (first, second):
        assert rank["text"] == ""
        assert rank["b"] == [300] * 4


def test_a_call_that_is_refused_is_not_counted():
    code = """
try:
    table.index_select(0, wrong).sum().item()
except IndexError:
    pass
bad = table.index_select(0, torch.tensor([50 * (1 - RANK)], device=device))
try:
    torch.acc.synchronize()
except IndexError:
    pass
def values():
    if RANK == 0:
        try:
            dist.all_reduce(bad)
        except Exception as error:
            report(refused=type(error).__name__)
    dist.all_reduce(b)
    time.sleep(2)  # until the ranks have compared
    dist.broadcast(b, 0)
    report(b=b.tolist())
heard(values)
"""
    first, second = reduced("FAILS = False" + FAILING + code)
    assert first["refused"]
    for rank in (first, second):
        assert rank["text"] == ""
        assert rank["b"] == [300] * 4


def test_lists_are_compared_size_by_size():
    code = """
def lists():
    sizes = (4, 6) if RANK == 0 else (6, 4)
    dist.all_reduce_coalesced([torch.ones(n, device=device) for n in sizes])
    torch.acc.synchronize()
heard(lists)
"""
    for rank in reduced(code):
        assert rank["kind"] == "DistBackendError"
        assert "all_reduce of 4 + 6 Float" in rank["text"]
        assert "all_reduce of 6 + 4 Float" in rank["text"]
