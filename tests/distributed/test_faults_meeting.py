"""Ranks that wait for others to make a group: they hear what has happened, and Ctrl-C ends it."""

from __future__ import annotations

import re

import pytest

from tests.distributed.ranks import run_to_end
from tests.distributed.test_faults import BEGIN, END, SOON, reduced

pytestmark = pytest.mark.usefixtures("acc_only")


def test_who_makes_a_group_hears_that_another_waits_for_it_elsewhere():
    """Long before the new group's own timeout."""
    code = """
if RANK == 0:
    heard(lambda: dist.new_group([0, 1], timeout=datetime.timedelta(minutes=10)))
else:
    heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    first, second = reduced(code, begin=SOON, timeout=60)
    assert second["kind"] == "DistBackendError"
    assert "rank 0 has not told of any" in second["text"]
    assert re.search(
        r"a group of ranks \[0, 1\] cannot be made: the default group has failed meanwhile \(rank "
        r"1 failed: .*all_reduce of 1000 Float \(0\) at \S+:\d+.*\), and ranks \[1\] have not come",
        first["text"],
        re.DOTALL,
    ), first["text"]
    assert max(first["seconds"], second["seconds"]) < 18


def test_who_goes_on_behind_an_error_of_the_default_group_is_still_waited_for():
    code = """
import torchacc_device
torchacc_device._C.seconds_to_hear = lambda: 60
def made():
    limit = datetime.timedelta(seconds=60)
    groups = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    for group in groups:  # the second is made where the default one has failed before
        dist.all_reduce(x, group=group)
    report(x=x[0].item())
if RANK == 1:
    y = x.clone()
    failed = refused(lambda: (dist.all_reduce(y), y.sum().item()))
    assert "rank 0 has not told of any" in failed, failed
    time.sleep(2)
heard(made)
"""
    for rank in reduced(code, begin=SOON):
        assert rank["text"] == "" and rank["x"] == 6


def test_a_group_without_a_timeout_waits_as_long_as_the_default_group():
    code = """
if RANK == 0:
    # Not at the beginning, where ranks may be as late as processes start.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), dist.group.WORLD)
    made = lambda: dist.new_group([0, 1]), lambda: dist.split_group(None, [[0, 1]])
    report(said=[refused(make) for make in made])
if RANK == 1:
    asleep_until_reported(0)
"""
    first, _ = reduced(code)
    assert len(first["said"]) == 2
    for said in first["said"]:
        assert "of ranks [0, 1] cannot be made: after 7 s ranks [1] have not come" in said


def test_a_timeout_that_is_given_is_that_of_the_meeting(device):
    """And not the default group's, even where it is c10d's own default."""
    code = """
from datetime import timedelta
from torchacc_device import _C, _distributed
dist.init_process_group("acc", timeout=timedelta(seconds=20))
limits, meet = [], _distributed._meet
def noting(*arguments):
    limits.append(arguments[3].total_seconds())
    meet(*arguments)
_distributed._meet = noting
for timeout in (timedelta(minutes=30), timedelta(seconds=7), None):
    dist.new_group([0], timeout=timeout)
    dist.split_group(None, [[0]], timeout=timeout)
alone = _C.seconds_to_hear()
more = _C.ProcessGroupACC(FakeProcessGroup._create_internal(0, 1024), dist.HashStore())
report(limits=limits, seconds=[alone, _C.seconds_to_hear()])
dist.destroy_process_group()
"""
    code = "from torch._C._distributed_c10d import FakeProcessGroup\n" + code
    (rank,) = run_to_end(code, 1)
    assert rank.reports["limits"] == [1800, 1800, 7, 7, 25, 25]
    assert rank.reports["seconds"] == [5, 21]  # they hear of errors the later the more there are


def test_who_has_waited_in_vain_for_a_group_meets_the_others_when_it_tries_again(device):
    """Where the group has the same name then, as those of some ranks that make it alone have."""
    code = """
from datetime import timedelta
dist.init_process_group("acc", timeout=timedelta(seconds=60))
store = dist.distributed_c10d._get_default_store()
def made(seconds):
    limit = timedelta(seconds=seconds)
    return dist.new_group([0, 1], timeout=limit, use_local_synchronization=True)
if RANK == 0:
    report(first=refused(lambda: made(1)))
    store.set("again", "1")
store.wait(["again"], timedelta(seconds=60))
x = torch.ones(3, device=DEVICE)
dist.all_reduce(x, group=made(60))
report(x=x.tolist())
dist.destroy_process_group()
"""
    ranks = [rank.reports for rank in run_to_end(code, 2)]
    assert "after 1 s ranks [1] have not come" in ranks[0]["first"]
    assert [rank["x"] for rank in ranks] == [[2.0] * 3] * 2


INTERRUPTED = """
from torchacc.dist import rendezvous
if RANK == 0:
    interrupted_where_it_waits()
    try:
        WAITS
    except KeyboardInterrupt:
        report(ended=True)
else:
    asleep_until_reported(0)
    time.sleep(2)
"""


@pytest.mark.parametrize(
    "waits",
    [
        "dist.new_group([0, 1])",
        "rendezvous('here')",
        "dist.destroy_process_group(); dist.init_process_group('acc')",
    ],
)
def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_come(waits):
    begin = BEGIN.replace("TIMEOUT = 50", "TIMEOUT = 600")
    first, _ = reduced(INTERRUPTED.replace("WAITS", waits), begin=begin, timeout=60)
    assert first["interrupted"] and first["ended"]


def test_a_rank_that_ends_while_it_looks_for_its_compiler_is_named():
    code = """
import datetime, torchacc_device
if RANK == 1:
    torchacc_device._C.kernels_problem = lambda: os._exit(3)
limit = datetime.timedelta(seconds=4)
report(said=refused(lambda: dist.init_process_group("acc", timeout=limit)))
"""
    first, second, third = run_to_end(code + END, 3, check=False)
    assert second.status == 3
    for rank in (first, third):
        assert re.search(
            r"a group of ranks \[0, 1, 2\] cannot be made: after 4 s ranks \[(0, )?1(, 2)?\] have",
            rank.reports["said"],
        ), rank.reports["said"]
