"""Ranks that die, are late, or do something else than the others: all of them hear why."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests import helpers
from tests.distributed.ranks import run_to_end

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = """
import contextlib, datetime, os, signal, sys, threading, time
from torch import nn
from torch.nn.parallel import DistributedDataParallel
TIMEOUT = 50
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=TIMEOUT))
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
x = torch.ones(1000, device=device) * (RANK + 1)

def heard(function):
    began = time.monotonic()
    try:
        function()
        torch.acc.synchronize()
    except Exception as error:
        return report(kind=type(error).__name__, text=str(error),
                      seconds=time.monotonic() - began)
    report(kind="", text="", seconds=time.monotonic() - began)

def asleep_until_reported(rank):
    # By a file: the process does nothing meanwhile that its group could see.
    until = time.monotonic() + 100
    while not os.path.exists(f"{os.environ['REPORTS']}/{rank}"):
        assert time.monotonic() < until, f"rank {rank} waits for this one"
        time.sleep(0.01)

def interrupted_where_it_waits():
    # Not after some seconds, in which a slow process would not have come there.
    main = threading.get_ident()
    def watch():
        place, looks = None, 0
        while looks < 40:
            time.sleep(0.05)
            frame = sys._current_frames()[main]
            last, place = place, (frame.f_code, frame.f_lasti)
            looks = looks + 1 if place == last else 0
        report(interrupted=True)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=watch, daemon=True).start()
"""
# The processes have nothing to say to each other any more.
END = """
os._exit(0)
"""


# For tests of what comes when it has passed; in others no rank is late, however slow it is.
SOON = BEGIN.replace("TIMEOUT = 50", "TIMEOUT = 8")


def reduced(code: str, ranks: int = 2, *, begin: str = BEGIN, **options) -> list[dict]:
    return [rank.reports for rank in run_to_end(begin + code + END, ranks, **options)]


def test_ranks_that_call_other_collectives_are_told_both():
    code = """
dist.all_reduce(x)
def other():
    dist.all_reduce(x)
    if RANK == 1:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)
    dist.all_reduce(x)
    x.sum().item()
heard(other)
"""
    for rank in reduced(code):
        assert rank["kind"] == "DistBackendError"
        assert re.search(
            r"collective number 3 of the group is all_reduce of 1000 Float \(0\) at \S+:\d+ in "
            r"other on rank 0, and broadcast of 1000 Float \(0\) at \S+:\d+ in other on rank 1",
            rank["text"],
        ), rank["text"]
        assert rank["seconds"] < 18


def test_ranks_of_a_part_are_called_what_they_are_in_the_whole():
    code = """
part = dist.new_group([1, 2])
def other():
    if RANK == 1:
        dist.broadcast(x, 1, group=part)
    elif RANK == 2:
        dist.all_reduce(x, group=part)
    x.sum().item()
heard(other)
"""
    _, *part = reduced(code, 3)
    for rank in part:
        assert re.search(
            r"is broadcast of 1000 Float \(0\) at \S+:\d+ in other on rank 1, and all_reduce of "
            r"1000 Float \(0\) at \S+:\d+ in other on rank 2",
            rank["text"],
        ), rank["text"]


def test_ranks_that_differ_in_a_size_are_told_both():
    code = """
def other():
    y = x[: 500 + 500 * RANK].clone()
    dist.all_reduce(y)
    y.sum().item()
heard(other)
"""
    for rank in reduced(code):
        assert rank["kind"] == "DistBackendError"
        assert re.search(
            r"all_reduce of 500 Float \(0\) at \S+:\d+ in other on rank 0, and "
            r"all_reduce of 1000 Float \(0\) at \S+:\d+ in other on rank 1",
            rank["text"],
        ), rank["text"]
        assert rank["seconds"] < 18


def test_ranks_that_leave_an_order_are_told_before_gloo_ends_one():
    """They have met both calls before, and neither behind the one that comes before them now."""
    code = """
y = x[:500].clone()
def other():
    for each in (x, y):
        dist.all_reduce(each)
        torch.acc.synchronize()
    dist.broadcast(x, 0)
    torch.acc.synchronize()
    each = x if RANK == 0 else y
    dist.all_reduce(each)
    each.sum().item()
heard(other)
"""
    for rank in reduced(code):
        assert "collective number 4 of the group is all_reduce of 1000 Float" in rank["text"]
        assert "all_reduce of 500 Float" in rank["text"]


def test_a_rank_that_is_far_ahead_of_one_that_does_something_else_is_told():
    """What it has recorded is as much as 95 collectives behind where they differ."""
    code = """
y = x[:500].clone()
def other():
    dist.all_reduce(x)
    dist.all_reduce(y)
    torch.acc.synchronize()
    if RANK == 1:
        time.sleep(3)  # until the other one has shown all
    for _ in range(100 if RANK == 0 else 4):
        dist.all_reduce(x, async_op=True)
    if RANK == 1:
        dist.all_reduce(y)
    torch.acc.synchronize()
heard(other)
"""
    for rank in reduced(code):
        assert "collective number 7 of the group is all_reduce of 1000 Float" in rank["text"]
        assert "all_reduce of 500 Float" in rank["text"]


def test_a_rank_that_is_late_is_named():
    code = """
dist.all_reduce(x)
x.sum().item()
if RANK == 1:
    time.sleep(TIMEOUT + 6)
heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    first, second = reduced(code, begin=SOON)
    assert second["kind"] == "DistBackendError", "the late rank waits for nobody"
    assert "rank 0 failed" in second["text"] and second["seconds"] < 18
    assert first["kind"] == "DistBackendError"
    assert "[acc::a" in first["text"]
    assert "in collective number 2 of the group, all_reduce of 1000 Float" in first["text"]
    assert first["text"].endswith("and rank 1 has told of 1)")
    assert 7 < first["seconds"] < 18


TRAIN = """
torch.manual_seed(0)
layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def step(i):
    optimizer.zero_grad()
    y = model(torch.ones(4, 8, device=device))
    if RANK == 1 and i == 5 and "{where}" == "forward":
        die()
    loss = y.square().mean()
    if RANK == 1 and i == 5 and "{where}" == "backward":
        loss.register_hook(lambda grad: die())
    loss.backward()
    if RANK == 1 and i == 5 and "{where}" == "step":
        die()
    optimizer.step()
    return loss
def train():
    if "{where}" == "collective":  # each takes some tenths of a second
        big = torch.ones(1 << 25, device=device)
        dist.barrier()
        if RANK == 1:
            threading.Timer(0.1, die).start()
        for _ in range(40):
            dist.all_reduce(big)
        big.sum().item()
    for i in range(20):
        loss = step(i)
    loss.item()
"""


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("forward", 2),
        ("backward", 3),
        ("step", 2),
        ("step", 3),
        ("collective", 2),
        ("collective", 3),
    ],
)
def test_a_rank_that_is_killed_ends_the_others(where, ranks):
    code = BEGIN + TRAIN.replace("{where}", where) + "heard(train)\n" + END
    began = time.monotonic()
    first, second, *others = run_to_end(code, ranks, check=False)
    assert second.status == -9
    for rank in (first, *others):
        assert rank.reports["kind"] == "DistBackendError"
        assert re.search(r"\[acc::a\w+\]", rank.reports["text"])
        assert re.search(r"all_reduce of \d+ Float \(0\) at \S+:\d+", rank.reports["text"])
        assert re.search(
            r"and rank 1 may have ended: it has given no sign of life since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC by its clock\)",
            rank.reports["text"],
        ), rank.reports["text"]
        assert rank.reports["seconds"] < 18
    assert time.monotonic() - began < 50


def test_a_rank_that_is_only_slow_is_not_said_to_have_ended():
    code = """
dist.all_reduce(x)
x.sum().item()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if RANK == 2:
    time.sleep(6)
heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    first, second, third = run_to_end(BEGIN + code + END, 3, check=False)
    assert second.status == -9
    for rank in (first, third):  # the slow one hears what the other was told
        assert re.search(r"rank 2 has told of 1, and rank 1 may have ended", rank.reports["text"])
        assert "rank 2 may have ended" not in rank.reports["text"]
        assert rank.reports["seconds"] < 18


def test_a_rank_that_fails_tells_the_others_at_once():
    """The first error is not that of a connection: somebody waits for a rank that gave up."""
    code = """
dist.all_reduce(x)
x.sum().item()
def others():
    # of three ranks two may end this one before they hear what the third has done instead
    dist.broadcast(x, 0)
    dist.all_reduce(x)
    x.sum().item()
if RANK == 1:
    heard(lambda: (dist.all_reduce(x[:10].clone()), torch.acc.synchronize()))
else:
    heard(others)
"""
    for rank in reduced(code, 3):
        assert rank["kind"] == "DistBackendError"
        assert rank["seconds"] < 18
        assert "all_reduce of 10 Float" in rank["text"]


def test_ctrl_c_on_one_rank_ends_it_and_the_others_hear_of_it():
    code = """
if RANK == 0:
    interrupted_where_it_waits()
    dist.all_reduce(x)
    x.sum().item()
asleep_until_reported(0)
time.sleep(4)
# At its end the other one still does what this one waits for, and no more.
heard(lambda: (dist.all_reduce(x), dist.all_reduce(x), x.sum().item()))
"""
    first, second = run_to_end(BEGIN + code + END, 2, check=False)
    assert first.status in (1, -signal.SIGINT)
    assert "interrupted while waiting for other processes" in first.stderr
    assert second.reports["kind"] == "DistBackendError"
    assert "rank 0" in second.reports["text"] and "all_reduce" in second.reports["text"]
    assert second.reports["seconds"] < 18


def test_ranks_that_log_alone_in_the_middle_of_a_step_are_no_fault():
    code = (
        TRAIN.replace("{where}", "")
        + """
import torchacc_device
def waits():
    counters = torchacc_device._C.stats().items()
    return sum(count for name, count in counters if name.startswith("group_waits/"))
for i in range(30):
    if i == 4:  # the buckets are made anew behind the first step
        met = waits()
    optimizer.zero_grad()
    y = model(torch.ones(4 + RANK, 8 , device=device))  # other lengths, other plans
    loss = y.square().mean()
    if RANK == 0 and i % 3 == 0:
        loss.item()
    loss.backward()
    if RANK == 1 and i % 4 == 0:
        next(model.parameters()).grad.norm().item()
    optimizer.step()
    if RANK == 0 and i % 5 == 0:
        loss.item()
report(met=met, waits=waits() - met)
same = [torch.empty_like(next(model.parameters())) for _ in range(WORLD)]
dist.all_gather(same, next(model.parameters()).detach())
report(equal=torch.equal(same[0], same[1]),
       idle=torchacc_device._C.stats()["flush_idle"])
"""
    )
    for rank in reduced(code):
        assert rank["equal"]
        assert rank["idle"] == 0
        assert rank["met"] > 0, "calls that are new are compared before they begin"
        assert rank["waits"] == 0, "and those that are known wait for nothing but the exchange"


def test_a_process_that_sleeps_behind_a_collective_keeps_nobody_waiting():
    code = """
if RANK == 0:
    dist.all_reduce(x)
    asleep_until_reported(1)
    report(woke=True)
else:
    dist.all_reduce(x)
    report(x=x[0].item())
"""
    first, second = reduced(code)
    assert second["x"] == 3 and first["woke"]  # rank 1 does not wait for it to wake up


def test_a_process_that_pauses_waits_for_nobody_who_is_elsewhere():
    """Rank 1 comes to the collective of acc only after one that rank 0 calls behind it."""
    code = """
on_cpu = dist.new_group(backend="gloo")
small = torch.zeros(1)
def other_orders():
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(1)
        y = torch.ones(3, device=device) * 2
        dist.broadcast(small.add_(7), 0, group=on_cpu)
    else:
        dist.broadcast(small, 0, group=on_cpu)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    report(small=small.item(), x=x[0].item())
heard(other_orders)
"""
    for rank in reduced(code):
        assert rank["text"] == ""
        assert (rank["small"], rank["x"]) == (7, 3)


def test_a_captured_step_is_counted_each_time_it_runs():
    """Else the next collective looks begun, and nobody submits it while this process pauses."""
    code = """
import torchacc
@torchacc.capture
def step(x):
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x + 1
def captured():
    for i in range(6):
        value = step(torch.full((3,), float(i + RANK), device=device))
    y = torch.ones(5, device=device)
    if RANK == 0:
        work = dist.all_reduce(y, async_op=True)
        report(early=work.is_completed())
        asleep_until_reported(1)
    else:
        asleep_until_reported(0)
        time.sleep(1)
        dist.all_reduce(y)
        y.sum().item()
        report(read=True)
    report(value=value.tolist(), y=y.tolist())
    if RANK == 1:
        dist.all_reduce(torch.ones(7, device=device))
    else:
        dist.broadcast(torch.ones(7, device=device), 0)
heard(captured)
"""
    first, second = reduced(code)
    assert "early" in first, (first, second)
    assert not first["early"] and second["read"]
    assert first["value"] == second["value"] == [6.5] * 3
    assert first["y"] == [2] * 5
    for rank in (first, second):
        assert "ranks do different things: collective number 8 " in rank["text"]


def test_asking_whether_a_collective_is_over_does_not_wait_for_other_programs():
    code = """
dist.all_reduce(x)
x.sum().item()
if RANK == 1:
    asleep_until_reported(0)
work = dist.all_reduce(x, async_op=True)
first = work.is_completed()
report(first=first)  # rank 1 has not come before
while not work.is_completed():
    time.sleep(0.01)
report(x=x[0].item())
"""
    first, second = reduced(code)
    assert not first["first"]
    assert first["x"] == second["x"] == 6


def test_bad_input_is_refused_before_anybody_waits():
    code = """
import torchacc_device
cpu, short = torch.ones(3), torch.ones(3, dtype=torch.int16, device=device)
good, bad = torch.ones(3, device=device), x[torch.tensor([5000], device=device)]
refused(torch.acc.synchronize)  # it has no valid contents
report(
    mixed=refused(lambda: dist.all_reduce_coalesced([good, bad], dist.ReduceOp.AVG)),
    spread=refused(lambda: dist.all_reduce(x[:1].expand(4), dist.ReduceOp.AVG)),
    cpu=refused(lambda: dist.all_reduce(cpu)),
    short=refused(lambda: dist.all_reduce(short)),
    bits=refused(lambda: dist.all_reduce(x, dist.ReduceOp.BAND)),
    parts=refused(lambda: dist.all_gather_into_tensor(torch.empty(7, device=device), x)),
    types=refused(lambda: dist.all_gather_into_tensor(torch.empty(2000, device=device), x.half())),
    rows=refused(lambda: dist.all_to_all_single(torch.empty(3, device=device), x[:3].clone())),
    own=refused(lambda: dist.all_to_all_single(torch.empty(4, device=device), x[:6].clone())),
    own_rows=refused(lambda: dist.all_to_all_single(
        torch.empty(4, 2, device=device), x[:12].view(4, 3), [2, 2], [2, 2])),
    own_parts=refused(lambda: dist.all_to_all(
        [torch.empty(4, device=device) for _ in range(2)],
        [torch.empty(3 + (rank != RANK), device=device) for rank in range(2)])),
    twice=refused(lambda: dist.init_process_group("acc")),
    sparse=refused(lambda: dist.all_reduce(torch.ones(2, 2).to_sparse().to(device))),
    elsewhere=refused(lambda: dist.all_gather_into_tensor(
        torch.empty(6, device=f"{DEVICE}:1"), torch.ones(3, device=f"{DEVICE}:0"))),
    among=refused(lambda: dist.all_reduce_coalesced(
        [torch.ones(3, device=f"{DEVICE}:{index}") for index in range(2)])),
    none=refused(lambda: dist.all_reduce_coalesced([])),
    good=good.tolist(),
)
"""
    for rank in reduced(code):
        assert "no valid contents" in rank["mixed"] and rank["good"] == [1] * 3
        assert "single memory location" in rank["spread"]
        assert "cpu" in rank["cpu"]
        assert rank["short"].startswith("TypeError") and "Short" in rank["short"]
        assert rank["bits"].startswith("TypeError") and "bitwise" in rank["bits"]
        assert "2000 elements, and the whole tensor has 7" in rank["parts"]
        assert "Float and Half" in rank["types"] or "Half and Float" in rank["types"]
        assert "3 rows cannot be divided among 2 ranks" in rank["rows"]
        assert "single: this rank sends 3 elements to itself, and has room for 2" in rank["own"]
        assert "sends 6 elements to itself, and has room for 4" in rank["own_rows"]
        assert "all_to_all: this rank sends 3 elements to itself" in rank["own_parts"]
        assert "twice" in rank["twice"]
        assert "acc has no sparse tensors" in rank["sparse"]
        assert "one device, got acc:1 and acc:0" in rank["elsewhere"]
        assert "one device, got acc:0 and acc:1" in rank["among"]
        assert "no tensor" in rank["none"] or "empty" in rank["none"]


def test_a_group_that_only_some_ranks_make_names_the_others():
    code = """
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    limit = datetime.timedelta(seconds=2)
    report(said=refused(lambda: dist.new_group([0, 1], timeout=limit)))
    store.set("told", "1")
store.wait(["told"])
dist.all_reduce(x)
report(x=x[0].item())
"""
    first, second = reduced(code)
    assert "a group of ranks [0, 1] cannot be made: after 2 s ranks [1] have not" in first["said"]
    assert first["x"] == second["x"] == 3


@pytest.mark.parametrize("mode", ["full", "eager"] if helpers.FULL else ["full"])
@pytest.mark.parametrize(
    "code",
    [
        "r = dist.irecv(y, peer); time.sleep(0.6); w = dist.isend(x, peer); r.wait(); w.wait()",
        "r = dist.irecv(y, peer); z.sum().item(); w = dist.isend(x, peer); r.wait(); w.wait()",
        """
if RANK == 0:
    r = dist.irecv(y, 1)
    dist.send(x, 1)
    dist.send(x + 1, 1)
    r.wait()
else:
    dist.recv(y, 0)
    dist.recv(y, 0)
    dist.send(x, 0)
""",
    ],
)
def test_who_receives_may_go_on_until_it_waits(code, mode):
    begin = "peer = 1 - RANK\ny, z = torch.zeros(1000, device=device), x + 1\n"
    done = reduced(begin + code + "\nreport(y=y[0].item())", ACC_MODE=mode)
    # x is 1 on rank 0 and 2 on rank 1; in the last program rank 0 sends 1 and then 2
    assert done[0]["y"] == 2
    assert done[1]["y"] == (2 if "x + 1" in code else 1)


def test_a_group_that_is_made_again_in_the_same_store_is_another_one():
    code = """
dist.all_reduce(x[:4].clone())
torch.acc.synchronize()
time.sleep(1.5)
dist.destroy_process_group()
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=TIMEOUT))
if RANK == 1:
    time.sleep(3)
heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    for rank in reduced(code):
        assert rank["text"] == ""


def test_a_rank_that_fails_alone_says_so_at_once_and_the_others_hear_why():
    code = """
if RANK == 0:
    def wrong():
        dist.all_reduce(x, async_op=True)
        table = torch.ones(10, device=device)
        torch.index_select(table, 0, torch.tensor([1, 50], device=device)).sum().item()
    heard(wrong)
    asleep_until_reported(1)
else:
    asleep_until_reported(0)  # it does not wait for this rank
    heard(lambda: (dist.all_reduce(x), dist.all_reduce(x), x.sum().item()))
"""
    first, second = reduced(code)
    assert first["kind"] == "IndexError"
    assert second["kind"] == "DistBackendError"
    assert "rank 0 failed: [aten::index_select] failed" in second["text"]


def test_the_collective_that_fails_is_named_not_the_last_one():
    code = """
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=2))  # less than it was made with
def late():
    if RANK == 1:
        time.sleep(5)
    dist.all_reduce(x[:4].clone())
    dist.broadcast(x[:5].clone(), 0)
    dist.all_reduce(x[:6].clone())
    torch.acc.synchronize()
heard(late)
"""
    first, second = reduced(code)
    assert "collective number 1 of the group" in first["text"]
    assert "rank 0 failed: " in second["text"]
    assert "in collective number 1 of the group, all_reduce of 4 Float" in second["text"]


def test_a_barrier_is_compared_too():
    code = """
def other():
    if RANK == 0:
        dist.barrier()
    else:
        dist.all_reduce(x)
        x.sum().item()
heard(other)
"""
    for rank in reduced(code):
        assert "barrier" in rank["text"] and "all_reduce of 1000 Float" in rank["text"]


def test_a_send_that_waits_for_a_collective_before_it_says_so_once():
    """It runs over Gloo at once: the collective need not be over there."""
    code = """
import torchacc_device
torchacc_device._C.tell_of_waits_after(0.5)
def late():
    for _ in range(2):
        if RANK == 1:
            time.sleep(2)
        dist.all_reduce(x)
        if RANK == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    if RANK == 1:
        time.sleep(2)
    dist.broadcast(x, 1)
    dist.barrier()
    report(value=x[0].item())
heard(late)
"""
    first, second = run_to_end(BEGIN + code + END, 2)
    assert first.reports["text"] == second.reports["text"] == ""
    assert first.reports["value"] == second.reports["value"] == 6
    told = re.findall(
        r"\[torch.distributed\] (.*) at \S+:(\d+) in late has waited for 0.5 s: what this process "
        r"has recorded before is finished first, and (.*) at \S+:(\d+) in late is not over",
        first.stderr,
    )
    assert [(what, before) for what, _, before, _ in told] == [
        ("send to rank 1", "all_reduce of 1000 Float (0)"),
        ("barrier", "broadcast of 1000 Float (1)"),
    ], first.stderr
    assert [int(behind) - int(before) for _, behind, _, before in told] == [2, 1]
    assert "has waited for" not in second.stderr


def test_what_was_sent_arrives_though_the_sender_ends():
    code = """
big = torch.ones(4_000_000, device=device)
if RANK == 0:
    for i in range(3):
        dist.isend(big * i, 1)
    dist.destroy_process_group()
else:
    time.sleep(2)
    for i in range(3):
        dist.recv(big, 0)
        assert big[-1].item() == i
"""
    run_to_end(BEGIN + code + END, 2)


def test_an_error_inside_a_batch_loses_nothing_silently():
    code = """
def batch():
    ops = [dist.P2POp(dist.isend, x, 1 - RANK), dist.P2POp(dist.irecv, torch.ones(3), 1 - RANK)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
heard(batch)
"""
    for rank in reduced(code):
        assert rank["kind"] != ""
