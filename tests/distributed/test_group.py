"""The default process group that `accelerate` makes, keeps, replaces and leaves."""

from __future__ import annotations

import functools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_to_end
from tests.helpers import run_python
from torchacc_device import _distributed

ALONE = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}

ACCELERATE = """
import torch.distributed as dist
import torchacc
model = torchacc.accelerate(torch.nn.Linear(3, 2))
"""


def alone(code: str, **options):
    return run_python(ACCELERATE + code, **ALONE, **options)


def test_a_process_without_a_launcher_is_a_group_of_its_own(device):
    code = """
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), type(model).__name__)
x = torch.ones(2, device=model.device)
dist.all_reduce(x)
dist.barrier()
print(x.tolist(), torchacc.dist.rendezvous("here", b"mine"))
"""
    assert alone(code).stdout.split("\n")[:2] == ["0 1 acc Linear", "[1.0, 1.0] [b'mine']"]


def test_the_programs_own_group_replaces_the_one_that_nobody_asked_for(device):
    code = """
first = dist.group.WORLD
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.group.WORLD is not first and dist.get_backend() == "gloo"
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)  # the program's own is not replaced
dist.destroy_process_group()
model = torchacc.accelerate(torch.nn.Linear(3, 2))
print(dist.get_backend())
torch.distributed.distributed_c10d.init_process_group(
    "cpu:gloo,acc:acc", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend_config())
"""
    lines = alone(code).stdout.splitlines()
    assert "twice" in lines[0] and lines[1:] == ["acc", "cpu:gloo,acc:acc"]


def test_a_group_that_the_program_destroys_is_gone(device):
    code = """
dist.destroy_process_group()
print(dist.is_initialized())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""
    assert alone(code).stdout.split() == ["False", "gloo"]


def test_a_group_that_only_garbage_knows_ends_before_the_interpreter(device):
    code = """
import sys
class Garbage:
    def __init__(self):
        self.itself, self.group = self, dist.group.WORLD
    def __del__(self):
        print(sys.is_finalizing())
Garbage()
"""
    assert alone(code).stdout.split() == ["False"]


def test_what_replaces_groups_can_be_undone(device):
    code = """
from torchacc_device import _patches
from torch.distributed import init_process_group
assert "torch.distributed.init_process_group" in _patches.applied()
_patches.undo()
original = init_process_group.__wrapped__
assert _patches.applied() == () and dist.init_process_group is original
print(torch.distributed.distributed_c10d.init_process_group is original)
try:
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)
"""
    lines = alone(code).stdout.splitlines()
    assert lines[0] == "True" and "twice" in lines[1]


def test_a_function_that_was_imported_before_replaces_the_group_too(device):
    code = (
        "from torch.distributed import init_process_group\n"
        + ACCELERATE
        + """
init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""
    )
    assert run_python(code, **ALONE).stdout.strip() == "gloo"


def test_errors_of_a_process_alone_look_as_always(device):
    done = alone("raise KeyError('mine')", check=False)
    assert done.returncode == 1
    assert "\nKeyError: 'mine'" in done.stderr and "rank0" not in done.stderr


def test_import_alone_makes_no_group(device):
    code = """
import torch.distributed as dist
import torchacc
from torchacc_device import _patches
print(dist.is_initialized(), set(_patches.LATER) & set(_patches.applied()))
"""
    # The template of children has imported torch._dynamo, and with it what draws for DTensors.
    assert run_python(code, fresh=True, **ALONE).stdout.strip() == "False set()"


def test_a_launched_process_joins_the_others_though_it_is_the_only_one(device):
    done = run_to_end(
        ACCELERATE + "report(world=dist.get_world_size(), name=type(model).__name__)", 1
    )
    assert done[0].reports == {"world": 1, "name": "Linear"}


@pytest.mark.parametrize("backend", ["acc", "lazy", "cpu:gloo,acc:acc", None])
def test_the_group_that_the_program_made_is_kept(device, backend):
    code = (
        f"dist.init_process_group({backend!r})\nmine = dist.group.WORLD\n"
        + ACCELERATE
        + """
import torch.distributed as dist
assert dist.group.WORLD is mine
model(torch.ones(4, 3, device=model.device)).sum().backward()
report(name=type(model).__name__, device=str(model.device), grad=model.weight.grad.tolist())
dist.destroy_process_group()
"""
    )
    done = run_to_end(code, 2)
    assert [each.reports for each in done] == [
        {
            "name": "DistributedParallel",
            "device": f"acc:{rank}",
            "grad": [[4.0] * 3] * 2,
        }
        for rank in range(2)
    ]


def test_the_group_of_a_launcher_is_not_made_twice_and_the_error_says_who_made_it(device):
    """Models are wrapped with it, so that it is not replaced."""
    code = (
        ACCELERATE
        + """
group = dist.group.WORLD
report(said=refused(lambda: dist.init_process_group("acc")), kept=dist.group.WORLD is group)
dist.destroy_process_group()
dist.init_process_group("cpu:gloo,acc:acc")  # the program's own from here on
report(own=dist.get_backend_config(), twice=refused(lambda: dist.init_process_group("acc")))
"""
    )
    for rank in run_to_end(code, 2):
        found = rank.reports
        said = "ValueError: [init_process_group] torchacc has made the default process group of the"
        assert found["said"].startswith(said) and found["kept"]
        assert "2 processes already, with the backend 'acc'" in found["said"]
        assert "Call torch.distributed.init_process_group before accelerate" in found["said"]
        assert found["own"] == "cpu:gloo,acc:acc"
        assert "twice" in found["twice"] and "torchacc" not in found["twice"]


def test_a_group_that_cannot_carry_tensors_of_the_device_is_refused(device):
    code = """
import torch.distributed as dist, torchacc
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torchacc.accelerate(torch.nn.Linear(3, 2))
"""
    done = run_python(code, check=False, **ALONE)
    assert done.returncode == 1
    assert "cannot exchange tensors of acc. Make it with" in done.stderr


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"MASTER_ADDR": None}, "RANK, WORLD_SIZE, MASTER_PORT are set"),
        ({"MASTER_PORT": None}, "in the environment, and MASTER_PORT is not"),
        ({"WORLD_SIZE": "2", "RANK": None}, "in the environment, and RANK is not"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1"),
        ({"WORLD_SIZE": None}, "in the environment, and WORLD_SIZE is not"),
    ],
)
def test_variables_that_are_incomplete_are_named_before_anyone_waits(device, changes, text):
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_python(ACCELERATE, check=False, **{**ALONE, **launcher, **changes})
    assert done.returncode == 1
    assert text in done.stderr and "Start with torchrun, which sets" in done.stderr


def test_a_plain_group_names_the_variable_that_is_not_set(device):
    code = 'import torch.distributed as dist, torchacc; dist.init_process_group("acc")'
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": None, "MASTER_PORT": "1"}
    done = run_python(code, check=False, **{**ALONE, **launcher})
    assert done.returncode == 1 and "MASTER_ADDR expected, but not set" in done.stderr


def test_programs_that_do_not_leave_their_group_end_quietly(device):
    code = (
        ACCELERATE
        + """
model(torch.ones(4, 3, device=model.device)).sum().backward()  # nobody reads the gradients
"""
    )
    for rank, each in enumerate(run_to_end(code, 2)):
        said = [line for line in each.stderr.splitlines() if "Time stats" not in line]
        # what is patched, and how the processes train together
        assert len(said) <= (2 if rank == 0 else 0), each.stderr


def test_an_error_of_the_program_is_its_end(device):
    code = ACCELERATE + "raise KeyError('mine')"
    for each in run_to_end(code, 2, check=False):
        assert each.status == 1 and "KeyError: 'mine'" in each.stderr


def test_processes_meet_and_exchange_what_they_bring(device):
    code = """
import torchacc
from torchacc.dist import rendezvous
report(all=[each.decode() for each in rendezvous("a", f"from {RANK}".encode())])
report(empty=[each.decode() for each in rendezvous("b")])
if RANK != 1:
    for turn in range(2):
        report(some=[each.decode() for each in rendezvous("c", b"x" * RANK, [2, 0])])
else:
    try:
        rendezvous("c", b"", [0, 2])
    except ValueError as error:
        report(error=str(error))
if RANK != 2:
    rendezvous("pair", b"", [0, 1])
if RANK != 1:  # process 2 was not there: nothing depends on how often
    rendezvous("other pair", b"", [0, 2])
rendezvous("end")
"""
    first, second, third = (each.reports for each in run_to_end(code, 3))
    for each in (first, second, third):
        assert each["all"] == ["from 0", "from 1", "from 2"] and each["empty"] == ["", "", ""]
    assert first["some"] == third["some"] == ["", "xx"]
    assert "process 1 is not one of the replicas [0, 2]" in second["error"]


def test_a_group_that_cannot_be_made_leaves_the_one_that_nobody_asked_for(device):
    code = """
import torch, torchacc
import torch.distributed as dist
torchacc.accelerate(torch.nn.Linear(1, 1))
try:
    dist.init_process_group("acc", rank=0)
except ValueError as error:
    print(error)
print(dist.get_rank(), dist.get_world_size())
store = dist.HashStore()
dist.init_process_group("acc", store=store, rank=0, world_size=1)
"""
    said = run_python(code, **ALONE).stdout.splitlines()
    assert len(said) == 2 and said[1] == "0 1"


def test_a_process_that_does_not_come_is_named(device):
    code = """
from datetime import timedelta
from torchacc.dist import rendezvous
dist.init_process_group("acc", timeout=timedelta(seconds=60))
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    try:
        rendezvous("here")
    except RuntimeError as error:
        report(error=str(error))
    store.set("told", "1")
store.wait(["told"], timedelta(seconds=60))
dist.destroy_process_group()
"""
    first, _ = run_to_end(code, 2)
    assert "'here' of ranks [0, 1]: after 3 s ranks [1] have not come" in first.reports["error"]


def test_a_process_that_has_given_up_meets_the_others_when_it_tries_again():
    code = """
from datetime import timedelta
from torchacc.dist import rendezvous
dist.init_process_group("acc", timeout=timedelta(seconds=60))
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    set_timeout = dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=1), dist.group.WORLD)
    report(error=refused(lambda: rendezvous("here")))
    set_timeout(timedelta(seconds=60), dist.group.WORLD)
    store.set("again", "1")
store.wait(["again"])
for _ in range(2):
    report(met=[each.decode() for each in rendezvous("here", str(RANK).encode())])
dist.destroy_process_group()
"""
    first, second = (each.reports for each in run_to_end(code, 2))
    assert "after 1 s ranks [1] have not come" in first["error"]
    assert first["met"] == second["met"] == ["0", "1"]


def test_ranks_that_do_not_meet_are_named_whatever_the_store(tmp_path):
    first, second = (dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    for store, rank in ((first, 0), (second, 1)):  # the later does not meet who has given up
        with pytest.raises(RuntimeError, match=rf"0.2 s ranks \[{8 - rank}\] have not come"):
            _distributed._meet(store, rank, 2, timedelta(seconds=0.2), [7, 8])


class Counting:
    """A store that counts the keys it is asked for, by a thread that waits for one, once."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), set()

    def __getattr__(self, name: str):
        def call(keys, *rest):
            for key in keys if isinstance(keys, list) else [keys]:
                self.asked.add((threading.get_ident(), name, key))
            return getattr(self.store, name)(keys, *rest)

        return call


def meet_together(store: Counting, size: int) -> None:
    with ThreadPoolExecutor(size) as pool:
        limit = timedelta(seconds=60)
        meet = functools.partial(_distributed._meet, timeout=limit, global_ranks=[])
        list(pool.map(meet, [store] * size, range(size), [size] * size))


@pytest.mark.parametrize("size", [2, 32])
def test_each_rank_of_a_new_group_asks_for_as_many_keys_however_many_they_are(size):
    store = Counting()
    meet_together(store, size)
    # Each is there, is counted and waits; the last one tells.
    assert len(store.asked) == 3 * size + 1


@pytest.mark.parametrize("size, looks", [(2, 650), (10_000, 65)])
def test_a_store_is_asked_the_less_often_the_more_ranks_wait(monkeypatch, size, looks):
    now, calls = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(_distributed, "time", clock)
    store = SimpleNamespace(check=lambda keys: calls.append(keys) is not None)
    said = _distributed._wait_for_key(store, "all", timedelta(seconds=60), size)
    assert said == "after 60 s" and now[0] == pytest.approx(60)
    assert 50 < len(calls) < looks


def test_who_has_given_up_is_not_counted_when_all_come_later():
    store = Counting()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come"):
            _distributed._meet(store, 0, 2, timedelta(seconds=0.2), [])
    meet_together(store, 2)


@pytest.mark.parametrize("at", [("add", 1), ("check", 1), ("check", 3)])
def test_who_is_interrupted_is_not_counted_when_all_come_later(at):
    class Interrupted(Counting):
        """The user does it at such a call."""

        calls = 0

        def __getattr__(self, name: str):
            if name == at[0]:
                self.calls += 1
                if self.calls == at[1]:
                    raise KeyboardInterrupt
            return super().__getattr__(name)

    store = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        _distributed._meet(store, 0, 2, timedelta(seconds=60), [])
    assert not store.check(["here/0"])
    meet_together(store, 2)
    count, _ = _distributed.meeting_keys("here")
    assert store.add(count, 0) == 2


def test_ranks_whose_store_is_lost_while_they_meet_are_told():
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", servers[0].port, wait_for_workers=False)
    losing = threading.Timer(1, servers.clear)
    losing.start()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] cannot be made: the store"):
        _distributed._meet(client, 0, 2, timedelta(seconds=60), [])
    losing.join()


def test_processes_that_meet_at_different_places_are_told(device):
    code = """
from torchacc.dist import rendezvous
try:
    rendezvous("left" if RANK == 0 else "right")
except RuntimeError as error:
    report(error=str(error))
"""
    done = run_to_end(code, 2)
    assert "process 0 is at 'left' and process 1 at 'right'" in done[0].reports["error"]
    assert "process 1 is at 'right' and process 0 at 'left'" in done[1].reports["error"]


def test_what_the_launcher_says_can_be_asked(device):
    code = """
from torchacc import dist
print(dist.rank(), dist.local_rank(), dist.world_size(), dist.BACKEND_NAME, dist.EAGER_BACKEND_NAME)
"""
    assert run_python(code, **ALONE).stdout.split() == ["0", "0", "1", "lazy", "nccl"]
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    said = run_python(code, **{**ALONE, **variables}).stdout
    assert said.split() == ["5", "1", "8", "lazy", "nccl"]


def test_more_processes_than_gpus_are_refused_and_unused_gpus_are_named(device, monkeypatch):
    """The machine is a pretended one with two GPUs."""
    import torch

    from torchacc.dist import group

    class TwoGpus:
        device_count = staticmethod(lambda: 2)

    monkeypatch.setattr(group, "_C", type("C", (), {"executor_name": staticmethod(lambda: "cuda")}))
    monkeypatch.setattr(torch, "get_device_module", lambda name: TwoGpus)
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    assert re.search(r"One of 2 GPUs is used.*torchrun --nproc_per_node=2 ", group.torchrun_line())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert group.torchrun_line() is None
    with pytest.raises(RuntimeError, match="WORLD_SIZE=3 and no LOCAL_RANK in the environment"):
        group.choose_device()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RuntimeError, match=r"3 processes .*LOCAL_WORLD_SIZE.* it has 2 usable"):
        group.choose_device()


def test_accelerate_names_unused_gpus_once(device):
    """On a pretended machine with eight."""
    code = """
import torch, torchacc
from torchacc.dist import group
group._C = type("C", (), {"executor_name": staticmethod(lambda: "cuda")})
torch.acc.device_count = lambda: 8
for _ in range(2):
    torchacc.accelerate(torch.nn.Linear(3, 2))
"""
    line = "One of 8 GPUs is used. To train on all of them: torchrun --nproc_per_node=8 "
    assert run_python(code, **ALONE).stderr.count(line) == 1
