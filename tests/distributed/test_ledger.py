"""What a rank asks of its group's store, by a store that notes it: no rank waits for another here.

The ranks are groups of one process, and what carries their collectives only pretends to.
"""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

GROUPS = """
import threading
from torch._C._distributed_c10d import FakeProcessGroup
from torchacc_device import _C

class Noting(dist.Store):
    def __init__(self):
        super().__init__()
        self.store, self.asked, self.news = dist.HashStore(), [], threading.Condition()
    def note(self, what, *keys):
        with self.news:
            self.asked.append((what, keys))
            self.news.notify_all()
    def clone(self):
        return self
    def set(self, key, value):
        self.store.set(key, value)
        self.note("set", key)
    def multi_set(self, keys, values):
        self.store.multi_set(keys, values)
        self.note("set", *keys)
    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected, desired)
    def add(self, key, value):
        return self.store.add(key, value)
    def get(self, key):
        self.note("get", key)
        return self.store.get(key)
    def multi_get(self, keys):
        self.note("get", *keys)
        return self.store.multi_get(keys)
    def check(self, keys):
        self.note("check", *keys)
        return self.store.check(keys)

def made(store, rank, size):
    return _C.ProcessGroupACC(FakeProcessGroup._create_internal(rank, size), store)
def all_reduce(group):
    x = torch.ones(3, device=DEVICE)
    return group.allreduce([x], dist.AllreduceOptions()), x
"""
# Threads beside the groups may be in the store, which is Python's.
END = """
os._exit(0)
"""


def test_an_idle_rank_asks_for_all_others_at_once():
    code = """
SIZE = 32
noting = Noting()
groups = [made(noting if rank == 0 else noting.store, rank, SIZE) for rank in range(SIZE)]
works = [all_reduce(group)[0] for group in groups]
for work in works[1:]:
    work.is_completed()  # which shows how far this rank has come
while not works[0].is_completed():
    pass
asked = [keys for what, keys in noting.asked if what == "check"]
report(
    alone=len({keys for keys in asked if len(keys) == 1 and keys[0][-1].isdigit()}),
    together=max(len(keys) for keys in asked),
)
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    assert rank.reports["together"] > 20
    assert rank.reports["alone"] < 12


def test_what_a_rank_has_begun_is_shown_before_it_would_look_at_the_others():
    """Else each collective would wait for a tick of every rank that is idle: ten between looks."""
    code = """
noting = Noting()
group = made(noting, 0, 2)
most = looks = shown = 0
seen = 0
while looks < 12 and most <= 25:
    all_reduce(group)[1].sum().item()
    is_shown = False
    while not is_shown:
        with noting.news:
            noting.news.wait_for(lambda: len(noting.asked) > seen)
            new, seen = noting.asked[seen:], len(noting.asked)
        for what, keys in new:
            if what == "set" and "alive" not in keys[0]:
                is_shown, shown = True, shown + 1
                most = max(most, shown)
            elif keys[0].endswith("failed"):
                looks, shown = looks + 1, 0
report(most=most)
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    assert rank.reports["most"] > 25


def test_a_rank_that_fails_asks_for_all_others_at_once():
    """What they have recorded, and their signs of life; Gloo's groups are real ones here."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
SIZE = 16
noting = Noting()
def gloo(rank):
    store = dist.PrefixStore("gloo", noting.store)
    return dist.ProcessGroupGloo(store, rank, SIZE, timeout=timedelta(seconds=60))
with ThreadPoolExecutor(SIZE) as pool:
    transports = list(pool.map(gloo, range(SIZE)))
for transport in transports:  # they have found each other, however long that took
    transport._set_default_timeout(timedelta(seconds=1))
groups = [
    _C.ProcessGroupACC(transport, noting if rank == 0 else noting.store)
    for rank, transport in enumerate(transports)
]
said = refused(lambda: all_reduce(groups[0])[1].sum().item())
def asked(what):
    keys = [keys for kind, keys in noting.asked if kind == "check" and what in keys[0]]
    return dict(alone=len({each for each in keys if len(each) == 1}), most=max(map(len, keys)))
report(said=said, shown=asked("shown"), alive=asked("alive"))
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    reports = rank.reports
    assert "rank 1 has not told of any, rank 2 has not told of any" in reports["said"]
    assert "may have ended" not in reports["said"]
    assert reports["alive"] == {"alone": 0, "most": 16}
    assert reports["shown"]["most"] == 16  # some are missing, and are looked for then


@pytest.mark.parametrize("how", ["shutdown", "abort"])
def test_a_group_that_has_ended_asks_for_nothing_though_a_work_of_it_is_kept(how):
    code = """
noting = Noting()
group = made(noting, 0, 2)
work, x = all_reduce(group)
x.sum().item()
getattr(group, HOW)()
del group
rounds = 0
with noting.news:  # a rank that lives gives a sign every second
    while rounds < 30 and noting.news.wait(3):
        rounds += 1
report(rounds=rounds, success=work.is_success())
"""
    (rank,) = run_ranks(GROUPS + f"HOW = {how!r}" + code + END, 1)
    assert rank.reports["rounds"] < 30


def test_who_is_ahead_compares_until_the_others_have_come():
    """All that it has done is over, and what it shows of it begins behind where they differ."""
    code = """
import time
store = dist.HashStore()
first, second = (made(store, rank, 2) for rank in range(2))
for group, count in ((first, 100), (second, 4)):
    for _ in range(count):
        all_reduce(group)
    torch.acc.synchronize()
    time.sleep(1)  # until it is shown
second.broadcast([torch.ones(3, device=DEVICE)], dist.BroadcastOptions())
until = time.monotonic() + 30
while time.monotonic() < until and str(first.get_error()).endswith("SUCCESS"):
    refused(torch.acc.synchronize)
    time.sleep(0.1)
report(said=refused(lambda: all_reduce(first)[1].tolist()))
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    assert "collective number 5 of the group is all_reduce of 3 Float" in rank.reports["said"]
    assert "broadcast of 3 Float" in rank.reports["said"]


def test_the_groups_of_a_process_share_a_connection_to_the_store():
    """It has the prefixes of each, and is closed when the last of them has gone."""
    code = """
import gc
from pathlib import Path
PORT = int(os.environ["MASTER_PORT"])

def connections():
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(each) in theirs()
        except FileNotFoundError:
            pass
    return found
def theirs():
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    return {f"socket:[{line[9]}]" for line in lines if line[2].endswith(f":{PORT:04X}")}

store = dist.TCPStore("127.0.0.1", PORT, is_master=False)
before = connections()
parts = [dist.PrefixStore("a", dist.PrefixStore(f"{i}", store)) for i in range(3)]
groups = [made(part, 0, 2) for part in parts]
for group in groups:
    all_reduce(group)[1].sum().item()
while not all(part.check(["ledger/shown/0"]) for part in parts):
    pass
with_groups = connections()
del groups, group
gc.collect()
while connections() > before:
    pass
report(before=before, opened=with_groups - before)
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    assert rank.reports == {"before": 1, "opened": 1}


def test_a_store_ends_with_its_groups_whoever_keeps_their_works():
    """Rank 0's is the server, whose port is free then."""
    code = """
import gc
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
port = store.port
works = []
for _ in range(3):
    groups = [made(store, rank, 2) for rank in range(2)]
    works += [all_reduce(group) for group in groups]
    torch.acc.synchronize()
    del groups, store
    gc.collect()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
report(works=len(works))
"""
    (rank,) = run_ranks(GROUPS + code + END, 1)
    assert rank.reports["works"] == 6
