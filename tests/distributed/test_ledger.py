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
    (rank,) = run_ranks(GROUPS + code + END, 1, timeout=60)
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
    (rank,) = run_ranks(GROUPS + code + END, 1, timeout=60)
    assert rank.reports["most"] > 25
